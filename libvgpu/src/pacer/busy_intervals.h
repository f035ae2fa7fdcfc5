/* Unions of busy intervals: work that overlaps keeps the card busy once. */
#ifndef VGPU_BUSY_INTERVALS_H
#define VGPU_BUSY_INTERVALS_H
#include <stdint.h>

#include "vgpu/region.h"

#define VGPU_SPANS 32u

struct vgpu_span {
    uint64_t begin, end;
};

/* Disjoint intervals in ascending order; the oldest go when there are too many. */
struct vgpu_spans {
    unsigned count;
    struct vgpu_span at[VGPU_SPANS];
};

/* Adds [begin, end); returns how much of it no interval covered yet. */
uint64_t vgpu_spans_add(struct vgpu_spans *spans, uint64_t begin, uint64_t end);

/* Writes [begin, end), CLOCK_MONOTONIC ns, into the container's ring of a card; returns how much of it no earlier
 * interval of the ring covers, whichever process measured that. */
uint64_t vgpu_busy_publish(struct vgpu_pacer_card *pacer, uint64_t begin, uint64_t end);
#endif
