/* The core limit: every launch pays its GPU time, and waits when the container is ahead of its share. See gcra.h for
 * the rule. */
#ifndef VGPU_PACER_H
#define VGPU_PACER_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "pacer/costs.h"
#include "pacer/inspect.h"
#include "pacer/samples.h"

/* One launch on its way: a kernel, a graph, or any other work that keeps the card from others. */
struct vgpu_launch {
    bool counted; /* false: not limited, not on a listed card, or captured */
    unsigned card;
    uint32_t others;            /* further cards that it runs on: bit by index in the limits */
    uint64_t reserved_ns;       /* GPU time that was paid for it, on each */
    uint32_t limit;             /* percent; 0: accounting only */
    struct vgpu_sample *sample; /* NULL: not measured */
    /* set by the hook: what is launched, a function or a kernel; NULL: something else, or several */
    CUfunction function;
};

/* Before the driver is called, unless vgpu_pacer_prepaid says that the launch is paid: pays, waits for the launch's own
 * start, begins a measurement. `key` tells what work takes as long (vgpu_cost_key), `stream` where it goes: the card is
 * that of the stream's context. False: the region is unusable, or the machine has no memory left: the hook answers out
 * of memory. */
bool vgpu_pacer_before(struct vgpu_launch *launch, uint64_t key, CUstream stream);
/* The same for work that runs on `others`, too. */
bool vgpu_pacer_before_on(struct vgpu_launch *launch, uint64_t key, CUstream stream, uint32_t others);
CUresult vgpu_pacer_settle(struct vgpu_launch *launch, CUresult result);
/* After it; returns `result`. A launch that failed gets its payment back. */
static inline CUresult vgpu_pacer_after(struct vgpu_launch *launch, CUresult result) {
    return launch->counted ? vgpu_pacer_settle(launch, result) : result;
}
void vgpu_pacer_look(void);
/* The program has waited for the card: what has ended is paid now, as the process may end before its next launch. */
static inline void vgpu_pacer_waited(void) {
    if (__builtin_expect(atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed) > 0, 0))
        vgpu_pacer_look();
}
/* Around a wait of the program for the card, by which it may show that it has work that nobody measures (inspect.h). */
void vgpu_pacer_waits(struct vgpu_wait *wait);
void vgpu_pacer_waited_for(const struct vgpu_wait *wait);
/* Functions or graphs have gone: their handles may come back for something else. key 0: any of them. A graph that is
 * updated keeps its estimate, which follows it as it follows a function whose arguments change: programs that update
 * one before each launch would learn nothing otherwise. */
void vgpu_pacer_stale(uint64_t key);
/* For the arbiter: there is work from `start` (CLOCK_MONOTONIC ns) on, as far as known for `gpu_ns`. */
void vgpu_pacer_wants(unsigned card, uint64_t start, uint64_t gpu_ns);
/* Share of a card's time that the container used lately, in percent. */
unsigned vgpu_pacer_utilization(unsigned card);
/* In a forked child: process.h. */
void vgpu_pacer_forget(void);
#endif
