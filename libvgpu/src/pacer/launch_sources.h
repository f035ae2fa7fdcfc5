/* From how many streams and threads this process launches. With one source, the events around a launch measure that
 * launch alone. With several, such a pair also contains the work of the others. So vgpu measures whole series of
 * launches, which pay for the union of their intervals. */
#ifndef VGPU_LAUNCH_SOURCES_H
#define VGPU_LAUNCH_SOURCES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define VGPU_SERIES 48u        /* launches of a series */
#define VGPU_SERIES_COVERS 16u /* the first launches of a series: earlier work may fall into their measurements */

/* launches of the current series still to be measured; 0 or less: there is no series */
extern _Atomic int32_t vgpu_series_left;
extern atomic_bool vgpu_measure_all; /* launches are rare, so every launch is measured */

/* True while every launch of every thread needs a look. */
static inline bool vgpu_sources_watches(void) {
    return atomic_load_explicit(&vgpu_measure_all, memory_order_relaxed) ||
           atomic_load_explicit(&vgpu_series_left, memory_order_relaxed) > 0;
}

/* A set of launch sources, as a Bloom filter of one word. Two sources may look like one; a later set usually tells them
 * apart. */
static inline uint64_t vgpu_sources_member(const void *stream, const void *thread) {
    uint64_t mixed =
        ((uint64_t)(uintptr_t)stream * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)(uintptr_t)thread * 0xc2b2ae3d27d4eb4full);
    return 1ull << (mixed >> 58);
}

/* A thread reports which sources it used and how many launches it made since its last report. now: CLOCK_MONOTONIC
 * ns. */
void vgpu_sources_note(uint64_t members, uint32_t launches, uint64_t now);
/* True if launches lately came from more than one source. */
bool vgpu_sources_several(void);
/* Begins a series, unless one is under way. */
void vgpu_series_begin(void);
void vgpu_sources_forget(void);
#endif
