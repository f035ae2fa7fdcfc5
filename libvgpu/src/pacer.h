/* The core limit: every launch pays its GPU time, and waits when the container is ahead of its share. See gcra.h for the rule. */
#ifndef VGPU_PACER_H
#define VGPU_PACER_H
#include <stdbool.h>
#include <stdint.h>

#include "cards.h"
#include "costs.h"

struct vgpu_sample;

/* One launch on its way. */
struct vgpu_launch {
    bool counted;              /* false: not limited, not on a listed card, or captured */
    unsigned card;
    uint32_t limit;            /* percent; 0: accounting only */
    CUstream stream;
    struct vgpu_cost *cost;
    uint64_t reserved_ns;      /* GPU time paid in advance */
    struct vgpu_sample *sample; /* NULL: not measured */
};

/* Before the driver is called: pays, waits for the launch's own start, begins a measurement. `key` from vgpu_cost_key; `stream` as the driver
 * will understand it (CU_STREAM_PER_THREAD spelled out). False: the region is unusable, the hook answers out of memory. */
bool vgpu_pacer_before(struct vgpu_launch *launch, uint64_t key, CUstream stream);
/* After it; returns `result`. A launch that failed gets its payment back. */
CUresult vgpu_pacer_after(struct vgpu_launch *launch, CUresult result);
/* A context is about to be destroyed: nothing of it will be collected any more. */
void vgpu_pacer_context_going(CUcontext context);
/* Share of a card's time that the container used lately, in percent. */
unsigned vgpu_pacer_utilization(unsigned card);
#endif
