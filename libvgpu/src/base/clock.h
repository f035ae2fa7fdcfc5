/* The one clock of the pacer: CLOCK_MONOTONIC in nanoseconds, the same in every process of the machine. */
#ifndef VGPU_CLOCK_H
#define VGPU_CLOCK_H
#include <stdint.h>
#include <time.h>

static inline uint64_t vgpu_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Sleeps, but returns early when a signal comes: callers check again. */
static inline void vgpu_sleep_until(uint64_t when_ns) {
    struct timespec at = {.tv_sec = (time_t)(when_ns / 1000000000u), .tv_nsec = (long)(when_ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}
#endif
