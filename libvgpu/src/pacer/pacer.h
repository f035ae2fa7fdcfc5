/* The core limit: every launch pays its GPU time, and waits if the container is ahead of its share. gcra.h has the
 * rule. */
#ifndef VGPU_PACER_H
#define VGPU_PACER_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "pacer/costs.h"
#include "pacer/inspect.h"
#include "pacer/samples.h"

/* One launch under way: a kernel, a graph, or other work that keeps the card from others. */
struct vgpu_launch {
    bool counted; /* false: no limit, no listed card, or captured */
    unsigned card;
    uint32_t others;            /* further cards on which the launch runs: bit by index in the limits */
    uint64_t reserved_ns;       /* GPU time paid for the launch, on each card */
    uint32_t limit;             /* percent; 0: accounting only */
    struct vgpu_sample *sample; /* NULL: not measured */
    /* set by the hook: the launched function or kernel; NULL: something else, or several */
    CUfunction function;
};

/* Call before the driver, unless vgpu_pacer_prepaid says that the launch is paid. Pays, waits for the start of this
 * launch, and begins a measurement. Launches with the same `key` take equally long (vgpu_cost_key). The card is that of
 * the context of `stream`. False: the region is unusable, or the machine has no memory left; then the hook answers out
 * of memory. */
bool vgpu_pacer_before(struct vgpu_launch *launch, uint64_t key, CUstream stream);
/* The same for work that also runs on `others`. */
bool vgpu_pacer_before_on(struct vgpu_launch *launch, uint64_t key, CUstream stream, uint32_t others);
CUresult vgpu_pacer_settle(struct vgpu_launch *launch, CUresult result);
/* Call after the driver; returns `result`. A failed launch gets its payment back. */
static inline CUresult vgpu_pacer_after(struct vgpu_launch *launch, CUresult result) {
    return launch->counted ? vgpu_pacer_settle(launch, result) : result;
}
void vgpu_pacer_look(void);
/* The program has waited for the card. Ended launches are settled now, because the process may end before its next
 * launch. */
static inline void vgpu_pacer_waited(void) {
    if (__builtin_expect(atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed) > 0, 0))
        vgpu_pacer_look();
}
/* Around a wait of the program for the card. A long wait may show that unmeasured work runs (inspect.h). */
void vgpu_pacer_waits(struct vgpu_wait *wait);
void vgpu_pacer_waited_for(const struct vgpu_wait *wait);
/* Functions or graphs have been destroyed: their handles may come back with another meaning. key 0: any handle. An
 * updated graph keeps its estimate, which adapts as for a function with new arguments. Otherwise a program that updates
 * a graph before each launch would never have an estimate. */
void vgpu_pacer_stale(uint64_t key);
/* For the arbiter: the container has work from `start` (CLOCK_MONOTONIC ns) on, for `gpu_ns` as far as known. */
void vgpu_pacer_wants(unsigned card, uint64_t start, uint64_t gpu_ns);
/* Share of a card's time that the container used lately, in percent. */
unsigned vgpu_pacer_utilization(unsigned card);
/* In a forked child: process.h. */
void vgpu_pacer_forget(void);
#endif
