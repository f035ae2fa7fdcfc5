/* What samples.c keeps of a context, and how event_times.c reads its events. */
#ifndef VGPU_SAMPLER_H
#define VGPU_SAMPLER_H
#include "pacer/busy_intervals.h"
#include "pacer/samples.h"

struct sampler {
    struct sampler *next;
    CUcontext context; /* NULL: destroyed; its samples wait for collection */
    /* calls under way that may destroy the context and its events: meanwhile the driver is not asked about the events
     */
    unsigned leaving;
    /* event on this context's time line, which counts ns from its first base; NULL: not yet */
    CUevent base;
    double base_ns;             /* place of `base` on the time line */
    double lag;                 /* CLOCK_MONOTONIC minus time line, ns */
    uint64_t lag_ns;            /* when `lag` was taken; 0: not yet known */
    struct vgpu_spans covered;  /* intervals that samples cover, on the time line, from a second before `base` on */
    struct vgpu_spans measured; /* the same, only samples measured by events */
    CUevent probe;              /* event recorded behind a pair, to measure the cost of an event; NULL: not yet */
    const struct vgpu_sample *probing; /* the sample that uses `probe`; NULL: the probe is free */
    struct vgpu_sample *spare;
    struct vgpu_sample *first, **last;
    unsigned count; /* number of event pairs */
};

/* Computes when the launch of a sample ran. Its context must be current and its events done. False: the driver does not
 * say. */
bool vgpu_sample_measure(struct sampler *sampler, struct vgpu_sample *sample, struct vgpu_measure *out);
/* For a bounded sample, only one fact is known: it ran before `end`, CLOCK_MONOTONIC ns. */
void vgpu_sample_bound(struct sampler *sampler, const struct vgpu_sample *sample, uint64_t end,
                       struct vgpu_measure *out);
/* True while the cost of an event on this card is not yet known. */
bool vgpu_events_uncalibrated(unsigned card);
#endif
