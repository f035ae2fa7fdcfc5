/* Unions of busy intervals: work that overlaps keeps the card busy once. */
#ifndef VGPU_BUSY_INTERVALS_H
#define VGPU_BUSY_INTERVALS_H
#include <stdint.h>

#include "vgpu/region.h"

#define VGPU_SPANS 32u

struct vgpu_span {
    uint64_t begin, end;
};

/* Disjoint intervals in ascending order; if there are too many, the oldest intervals are dropped. */
struct vgpu_spans {
    unsigned count;
    struct vgpu_span at[VGPU_SPANS];
};

/* Adds [begin, end); returns how much of it no earlier interval covers. */
uint64_t vgpu_spans_add(struct vgpu_spans *spans, uint64_t begin, uint64_t end);

/* Writes [begin, end), CLOCK_MONOTONIC ns, into the container's ring for the card. Returns how much of it no earlier
 * interval of the ring covers; any process of the container may have measured that interval. */
uint64_t vgpu_busy_publish(struct vgpu_pacer_card *pacer, uint64_t begin, uint64_t end);
#endif
