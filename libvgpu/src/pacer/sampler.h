/* What samples.c keeps of a context, and how event_times.c reads its events. */
#ifndef VGPU_SAMPLER_H
#define VGPU_SAMPLER_H
#include "pacer/busy_intervals.h"
#include "pacer/samples.h"

struct sampler {
    struct sampler *next;
    CUcontext context; /* NULL: gone, its samples wait for being collected */
    /* calls under way that may destroy it, and its events with it: the driver is not asked about these */
    unsigned leaving;
    CUevent base;               /* on this context's time line, which counts ns from its first base; NULL: not yet */
    double base_ns;             /* where it lies */
    double lag;                 /* CLOCK_MONOTONIC less time line, ns */
    uint64_t lag_ns;            /* as it was then; 0: not yet known */
    struct vgpu_spans covered;  /* what samples have covered, on the time line, from a second before it on */
    struct vgpu_spans measured; /* the same of those that events have measured */
    CUevent probe;              /* recorded behind a pair, to see what an event takes; NULL: not yet */
    const struct vgpu_sample *probing; /* whose; NULL: it is free */
    struct vgpu_sample *spare;
    struct vgpu_sample *first, **last;
    unsigned count; /* of pairs of events */
};

/* With its context current, and its events done: when it ran. False: the driver does not say. */
bool vgpu_sample_measure(struct sampler *sampler, struct vgpu_sample *sample, struct vgpu_measure *out);
/* All that is known of a bounded one: it ran within the time until `end`, CLOCK_MONOTONIC ns. */
void vgpu_sample_bound(struct sampler *sampler, const struct vgpu_sample *sample, uint64_t end,
                       struct vgpu_measure *out);
/* It is not yet known what an event takes of this card. */
bool vgpu_events_uncalibrated(unsigned card);
#endif
