/* Work that pays a mean can hide behind it: a launch that is seldom much longer than others of its kind, or one that a
 * process makes before it ends. It shows in two ways: a launch that was measured at random is unlike its mean, or a
 * wait for the card was longer than all that was paid for. Then the process is inspected on that card: for a while each
 * of its launches is measured and pays what it took. What they took more than their means is charged for the time
 * before, too, in proportion to what was paid then. */
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

/* Ends an inspection that is over. Returns what is to be charged because of it, ns of GPU time; negative: given back.
 * now: CLOCK_MONOTONIC ns. */
int64_t vgpu_inspect_turn(unsigned card, uint64_t now);
/* A launch that was measured at random took `gpu_ns`, and others of its kind pay `mean_ns`. True: it is unlike them, so
 * that it pays for itself and teaches nothing; an inspection has begun. */
bool vgpu_inspect_sample(unsigned card, uint64_t gpu_ns, uint64_t mean_ns, uint64_t now);
/* One that was measured because of the inspection. */
void vgpu_inspect_found(unsigned card, uint64_t gpu_ns, uint64_t mean_ns);

/* A launch has paid a mean and is not measured: from now on waits may show that it was longer. */
void vgpu_inspect_unmeasured(unsigned card);
/* The process pays for work, which may be to come. */
void vgpu_inspect_paid(unsigned card, uint64_t gpu_ns, uint64_t now);
/* A wait of the program for the card. */
struct vgpu_wait {
    uint64_t begun_ns;     /* CLOCK_MONOTONIC; 0: there is nothing to find out */
    uint64_t explained_ns; /* GPU time that had been charged by then, less what was still to come of it */
};
void vgpu_inspect_wait(struct vgpu_wait *wait, unsigned card, uint64_t now);
/* It is over, and what was measured is charged. Returns what has to be charged because nothing explains it, ns of GPU
 * time: it is given back when the inspection that it begins finds nothing. */
uint64_t vgpu_inspect_waited(const struct vgpu_wait *wait, unsigned card, uint64_t now);
/* In a forked child: process.h. */
void vgpu_inspect_forget(void);
#endif
