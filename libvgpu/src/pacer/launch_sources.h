/* How many streams and threads this process launches from. One alone: events around a launch measure that launch.
 * Several: such a pair contains the others' work, so that series of launches are measured, all of them, and pay for the
 * union of their intervals. */
#ifndef VGPU_LAUNCH_SOURCES_H
#define VGPU_LAUNCH_SOURCES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define VGPU_SERIES 48u        /* launches of a series */
#define VGPU_SERIES_COVERS 16u /* at its beginning: what was under way before may be in them */

/* launches of the series under way still to be measured; 0 or less: none is under way */
extern _Atomic int32_t vgpu_series_left;
extern atomic_bool vgpu_measure_all; /* launches are so few that all of them are measured */

/* True while every launch of every thread is to be looked at. */
static inline bool vgpu_sources_watches(void) {
    return atomic_load_explicit(&vgpu_measure_all, memory_order_relaxed) ||
           atomic_load_explicit(&vgpu_series_left, memory_order_relaxed) > 0;
}

/* A set of sources of launches, as a Bloom filter of one word; two of them may be taken for one, which a later set
 * tells apart or nobody notices. */
static inline uint64_t vgpu_sources_member(const void *stream, const void *thread) {
    uint64_t mixed =
        ((uint64_t)(uintptr_t)stream * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)(uintptr_t)thread * 0xc2b2ae3d27d4eb4full);
    return 1ull << (mixed >> 58);
}

/* A thread tells which sources it used and how many launches it made since the last time. now: CLOCK_MONOTONIC ns. */
void vgpu_sources_note(uint64_t members, uint32_t launches, uint64_t now);
/* True if there was lately more than one source. */
bool vgpu_sources_several(void);
/* Begins a series, unless one is under way. */
void vgpu_series_begin(void);
void vgpu_sources_forget(void);
#endif
