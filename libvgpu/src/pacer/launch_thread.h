/* What one thread remembers of its launches: what it has paid in advance, how fast it launches, and when it measures
 * the next time. */
#ifndef VGPU_LAUNCH_THREAD_H
#define VGPU_LAUNCH_THREAD_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* mean time between launches below which measurements, of some microseconds each, have to be rare */
#define VGPU_FAST_NS 5000u

struct vgpu_launch_thread {
    unsigned card;
    uint32_t filled; /* what vgpu_prepaid held when the thread last looked up: launches, ns */
    uint64_t filled_ns;
    uint64_t batch_ns;    /* what it paid the last time */
    uint64_t looked_ns;   /* CLOCK_MONOTONIC of that */
    uint64_t interval_ns; /* mean time between launches */
    uint64_t recent_ns;   /* sums that forget, as the quotient of which it comes; launches in sixteenths */
    uint64_t recent_launches;
    uint64_t collected_ns; /* when it last asked for results */
    uint64_t random;
    int64_t until_sample; /* launches until the next measurement */
    bool unpaced;         /* left_ns was not paid: it says how much more may go uncounted */
    bool coupled;         /* the next launch is paid and follows at once, to be measured */
};
extern __thread __attribute__((tls_model("initial-exec"))) struct vgpu_launch_thread vgpu_self;

/* The thread looks up: counts what it has launched since the last time, and forgets what is no longer valid. `key` and
 * `stream` of the launch that it makes now. */
void vgpu_thread_look_up(unsigned card, uint64_t key, CUstream stream, uint64_t now);
/* Draws after how many launches it measures the next time; settled: the mean of this kind of launch is known well. */
void vgpu_thread_draw(bool settled);
/* How many launches it may make until it looks up again; a measurement that is due before ends them. */
uint32_t vgpu_thread_ahead(void);
#endif
