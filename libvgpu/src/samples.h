/* Measuring launches by pairs of events around them. Asynchronous: results are collected later, nothing ever waits for the card. */
#ifndef VGPU_SAMPLES_H
#define VGPU_SAMPLES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "costs.h"
#include "driver.h"

struct vgpu_sample {
    struct vgpu_sample *next;
    CUcontext context;
    CUevent before, after;
    struct vgpu_cost *cost;
    uint64_t reserved_ns; /* what the launch has paid */
    uint64_t gap_ns;      /* host time between the first event and the launch, if the stream was idle then; else 0 */
    uint32_t limit;       /* percent it was paid at; 0: not paced */
    uint32_t card;
};

/* Samples whose result nobody has collected yet, of all contexts: nothing to do while it is 0. */
extern atomic_int vgpu_samples_outstanding;

/* Records the first event; NULL: not now (no events to be had, or somebody else is collecting). The context is current. */
struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream);
/* Records the second event behind the launch and leaves the sample to be collected; launched false: there was no launch. */
void vgpu_sample_end(struct vgpu_sample *sample, CUstream stream, bool launched);
/* Gives every finished sample of this context, with the GPU time that it adds to the time before it (overlap with earlier samples is counted
 * once), to `each`. Returns false if none is under way. */
bool vgpu_samples_collect(CUcontext context, void (*each)(const struct vgpu_sample *, uint64_t gpu_ns));
/* The context is about to go, and its events with it. */
void vgpu_samples_drop(CUcontext context);
#endif
