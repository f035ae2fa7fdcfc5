/* Work of which nothing is known: how long it takes, nor how long work like it took. One launch of that kind at a time
 * is under way on a card, as far as waiting for it can do, so that a flood of long kernels cannot start unpaid; and
 * what a process leaves unpaid when it ends is in the region, for who reaps it. */
#ifndef VGPU_OWED_H
#define VGPU_OWED_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"

/* The calling thread's launch is the one; false: another is under way. now: CLOCK_MONOTONIC ns, not 0. */
bool vgpu_unknown_begin(unsigned card, uint64_t now);
/* It has been measured, or was none. */
void vgpu_unknown_end(unsigned card);
/* For how long the one of that card has been under way; 0: there is none. */
uint64_t vgpu_unknown_age(unsigned card, uint64_t now);

/* A launch that is not paid begins (at `now`) and ends: kept in the process's slot of the region meanwhile. */
void vgpu_owed_begin(unsigned card, uint64_t now);
void vgpu_owed_end(unsigned card);
/* A launch that pays a mean begins: it may be longer, which shows when the program waits for it (inspect.h). One that
 * ends without that, and without having seen its stream idle, owes the time since, up to a second. */
void vgpu_owed_mark(const struct vgpu_place *place, CUstream stream, uint64_t now);
/* The program has waited for something: was it that? */
void vgpu_owed_ask(void);
extern atomic_bool vgpu_owed_marked;
static inline void vgpu_owed_look(void) {
    if (__builtin_expect(atomic_load_explicit(&vgpu_owed_marked, memory_order_relaxed), 0))
        vgpu_owed_ask();
}
/* A stream goes, with the handle by which it could be asked. */
void vgpu_owed_stream_going(CUstream stream);

/* The process has paid while something is owed. */
void vgpu_owed_paid(unsigned card, int64_t gpu_ns);
/* In a forked child: process.h. */
void vgpu_owed_forget(void);
#endif
