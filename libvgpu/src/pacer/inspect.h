/* Work can hide behind a mean: a launch that is seldom much longer than others of its kind, or a launch that a process
 * makes just before it ends. Two things show such work: a randomly measured launch is unlike its mean, or a wait for
 * the card was longer than all paid work. Then vgpu inspects the process on that card. For a while it measures each
 * launch, and each launch pays its real time. If the launches took more than their means, the process also pays for the
 * time before, in proportion to its payments then. */
#ifndef VGPU_INSPECT_H
#define VGPU_INSPECT_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/region.h"

/* CLOCK_MONOTONIC ns; 0: launches on the card are not inspected */
extern _Atomic uint64_t vgpu_inspected_until[VGPU_MAX_CARDS];

static inline bool vgpu_inspecting(unsigned card) {
    return atomic_load_explicit(&vgpu_inspected_until[card], memory_order_relaxed) != 0;
}

/* Ends an inspection whose time is over. Returns the GPU time (ns) to charge because of it; negative: to give back.
 * now: CLOCK_MONOTONIC ns. */
int64_t vgpu_inspect_turn(unsigned card, uint64_t now);
/* A randomly measured launch took `gpu_ns`, while launches of its kind pay `mean_ns`. True: the launch is unlike the
 * others, and an inspection has begun. Then the launch pays its own time, and the estimate ignores it. */
bool vgpu_inspect_sample(unsigned card, uint64_t gpu_ns, uint64_t mean_ns, uint64_t now);
/* A launch was measured because of the inspection. */
void vgpu_inspect_found(unsigned card, uint64_t gpu_ns, uint64_t mean_ns);

/* A launch has paid a mean and is not measured: from now on, a wait may show that it was longer. */
void vgpu_inspect_unmeasured(unsigned card);
/* The process pays for work, which may still lie ahead. */
void vgpu_inspect_paid(unsigned card, uint64_t gpu_ns, uint64_t now);
/* The program waits for the card. */
struct vgpu_wait {
    uint64_t begun_ns;     /* CLOCK_MONOTONIC; 0: the wait cannot show anything */
    uint64_t explained_ns; /* GPU time charged by then, less the charged work that was still to run */
};
void vgpu_inspect_wait(struct vgpu_wait *wait, unsigned card, uint64_t now);
/* The wait is over, and the measured launches are charged. Returns the GPU time (ns) to charge because no charge
 * explains the wait. It is given back if the inspection that begins here finds nothing. */
uint64_t vgpu_inspect_waited(const struct vgpu_wait *wait, unsigned card, uint64_t now);
/* In a forked child: process.h. */
void vgpu_inspect_forget(void);
#endif
