/* Unknown work: neither its own duration nor that of similar work is known. As far as waiting can ensure it, only one
 * unknown launch at a time is under way on a card. This keeps many long kernels from starting unpaid. If a process ends
 * with unpaid work, the region still says so, and the process that reaps the slot charges it. */
#ifndef VGPU_OWED_H
#define VGPU_OWED_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"

/* Makes the calling thread's launch the unknown launch of the card; false: another is under way. now: CLOCK_MONOTONIC
 * ns, not 0. */
bool vgpu_unknown_begin(unsigned card, uint64_t now);
/* The unknown launch has been measured, or did not happen. */
void vgpu_unknown_end(unsigned card);
/* For how long the unknown launch of the card has been under way; 0: there is none. */
uint64_t vgpu_unknown_age(unsigned card, uint64_t now);

/* Begin (at `now`) and end of a launch that is not paid; meanwhile the process's slot in the region records it. */
void vgpu_owed_begin(unsigned card, uint64_t now);
void vgpu_owed_end(unsigned card);
/* A launch that pays a mean begins. It may run longer, which shows when the program waits for it (inspect.h). A process
 * that ends without such a wait, and without having seen the stream idle, owes the time since then, up to a second. */
void vgpu_owed_mark(const struct vgpu_place *place, CUstream stream, uint64_t now);
/* The program has waited for something: checks whether the marked launch has ended. */
void vgpu_owed_ask(void);
extern atomic_bool vgpu_owed_marked;
static inline void vgpu_owed_look(void) {
    if (__builtin_expect(atomic_load_explicit(&vgpu_owed_marked, memory_order_relaxed), 0))
        vgpu_owed_ask();
}
/* A stream is being destroyed: its handle can no longer be asked. */
void vgpu_owed_stream_going(CUstream stream);

/* The process has paid while it owes unknown work. */
void vgpu_owed_paid(unsigned card, int64_t gpu_ns);
/* In a forked child: process.h. */
void vgpu_owed_forget(void);
#endif
