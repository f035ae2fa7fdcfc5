/* What one thread remembers of its launches: what it has paid in advance, how fast it launches, and when it takes its
 * next measurement. */
#ifndef VGPU_LAUNCH_THREAD_H
#define VGPU_LAUNCH_THREAD_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* Below this mean time between launches, measurements must be rare: each takes some microseconds. */
#define VGPU_FAST_NS 5000u

struct vgpu_launch_thread {
    unsigned card;
    uint32_t filled; /* what vgpu_prepaid held at the last look-up: launches, ns */
    uint64_t filled_ns;
    uint64_t batch_ns;    /* its last payment */
    uint64_t looked_ns;   /* time of the last look-up, CLOCK_MONOTONIC */
    uint64_t interval_ns; /* mean time between launches */
    uint64_t recent_ns;   /* decaying sums; interval_ns is their quotient; launches count in sixteenths */
    uint64_t recent_launches;
    uint64_t collected_ns; /* when the thread last collected results */
    uint64_t random;
    int64_t until_sample; /* launches until the next measurement */
    bool unpaced;         /* left_ns is not paid: it says how much GPU time may still go uncounted */
    bool coupled;         /* the next launch is already paid, follows at once, and will be measured */
};
extern __thread __attribute__((tls_model("initial-exec"))) struct vgpu_launch_thread vgpu_self;

/* The thread looks up: it counts its launches since the last look-up and drops what is no longer valid. `key` and
 * `stream` belong to the launch being made. */
void vgpu_thread_look_up(unsigned card, uint64_t key, CUstream stream, uint64_t now);
/* Draws the number of launches until the next measurement; settled: the mean of this kind of launch is known well. */
void vgpu_thread_draw(bool settled);
/* How many launches the thread may make until its next look-up; never beyond the next measurement. */
uint32_t vgpu_thread_ahead(void);
#endif
