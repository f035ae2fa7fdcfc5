#define _GNU_SOURCE
#include "samples.h"

#include <stdlib.h>
#include <time.h>

#include "capture.h"
#include "fork.h"
#include "spin.h"

#define CONTEXTS 16u
#define MAX_SAMPLES 256u      /* per context: of events that exist at once */
#define MAX_UNFINISHED 8u     /* looked at before a collection gives up: streams finish in any order, but not in every order */
#define REBASE_MS 4000.0f     /* a float of milliseconds resolves 0.5 us up to here */

struct sampler {
    CUcontext context;        /* NULL: free */
    CUevent base;             /* zero of this context's time line; NULL: not yet */
    double last_end_ms;       /* latest end of a sample, on that line */
    struct vgpu_sample *spare;
    struct vgpu_sample *first, **last;
    unsigned count;
};

atomic_int vgpu_samples_outstanding;
static struct sampler samplers[CONTEXTS];
static vgpu_spin lock; /* of all samplers; held across event calls, so others try and otherwise do without */

void vgpu_samples_forget(void) {
    for (unsigned i = 0; i < CONTEXTS; i++)
        samplers[i].context = NULL;
    atomic_store(&vgpu_samples_outstanding, 0);
    atomic_store(&lock, 0);
}

static struct sampler *sampler_of(CUcontext context, bool make) {
    struct sampler *vacant = NULL;
    for (unsigned i = 0; i < CONTEXTS; i++) {
        if (samplers[i].context == context)
            return &samplers[i];
        if (!samplers[i].context && !vacant)
            vacant = &samplers[i];
    }
    if (!make || !vacant)
        return NULL;
    *vacant = (struct sampler){.context = context, .last = &vacant->first};
    return vacant;
}

static struct vgpu_sample *new_sample(struct sampler *sampler) {
    struct vgpu_sample *sample = sampler->spare;
    if (sample) {
        sampler->spare = sample->next;
        return sample;
    }
    __typeof__(&cuEventCreate) create = DRIVER(cuEventCreate);
    if (sampler->count >= MAX_SAMPLES || !create || !(sample = calloc(1, sizeof *sample)))
        return NULL;
    if (create(&sample->before, CU_EVENT_DEFAULT) != CUDA_SUCCESS || create(&sample->after, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        free(sample); /* an event of a half made pair stays until its context goes */
        return NULL;
    }
    sample->context = sampler->context;
    sampler->count++;
    return sample;
}

static void set_aside(struct sampler *sampler, struct vgpu_sample *sample) {
    sample->next = sampler->spare;
    sampler->spare = sample;
}

/* Our event calls must not be refused by, or break, a capture that another thread begins at this moment. */
static CUstreamCaptureMode relax(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

static void restore(CUstreamCaptureMode mode) {
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream) {
    __typeof__(&cuEventRecord) record = DRIVER(cuEventRecord);
    __typeof__(&cuEventQuery) query = DRIVER(cuEventQuery);
    if (vgpu_any_capture() || !record || !query || !vgpu_spin_try(&lock))
        return NULL;
    CUstreamCaptureMode mode = relax();
    struct sampler *sampler = sampler_of(context, true);
    struct vgpu_sample *sample = sampler ? new_sample(sampler) : NULL;
    bool recorded = sample && record(sample->before, stream) == CUDA_SUCCESS;
    if (sample && !recorded)
        set_aside(sampler, sample);
    vgpu_spin_unlock(&lock);
    if (recorded)
        sample->gap_ns = query(sample->before) == CUDA_SUCCESS ? now_ns() : 0;
    restore(mode);
    return recorded ? sample : NULL;
}

void vgpu_sample_end(struct vgpu_sample *sample, CUstream stream, bool launched) {
    if (sample->gap_ns)
        sample->gap_ns = now_ns() - sample->gap_ns;
    CUstreamCaptureMode mode = relax();
    bool recorded = launched && DRIVER(cuEventRecord)(sample->after, stream) == CUDA_SUCCESS;
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(sample->context, false);
    if (recorded && sampler) {
        sample->next = NULL;
        *sampler->last = sample;
        sampler->last = &sample->next;
        atomic_fetch_add(&vgpu_samples_outstanding, 1);
    } else if (sampler) {
        set_aside(sampler, sample);
    }
    vgpu_spin_unlock(&lock);
    restore(mode);
    if (!recorded)
        atomic_fetch_sub(&sample->cost->flying, 1);
}

/* Makes the end of this sample the new zero. */
static void rebase(struct sampler *sampler, struct vgpu_sample *sample) {
    CUevent old = sampler->base;
    sampler->base = sample->after;
    sampler->last_end_ms = 0;
    sample->after = old;
    if (!old && DRIVER(cuEventCreate)(&sample->after, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        sample->after = sampler->base;
        sampler->base = NULL;
    }
}

/* GPU time of a finished sample in ns, less what earlier samples cover of it. */
static uint64_t measure(struct sampler *sampler, struct vgpu_sample *sample) {
    __typeof__(&cuEventElapsedTime) elapsed = DRIVER(cuEventElapsedTime);
    float whole = 0, start = 0;
    if (!elapsed || elapsed(&whole, sample->before, sample->after) != CUDA_SUCCESS || !(whole > 0))
        return 0;
    double busy = whole;
    if (!sampler->base) {
        rebase(sampler, sample);
    } else if (elapsed(&start, sampler->base, sample->before) == CUDA_SUCCESS) {
        double end = (double)start + whole;
        if ((double)start < sampler->last_end_ms)
            busy = end > sampler->last_end_ms ? end - sampler->last_end_ms : 0;
        if (end > sampler->last_end_ms)
            sampler->last_end_ms = end;
        if (end > REBASE_MS)
            rebase(sampler, sample);
    }
    return (uint64_t)(busy * 1e6);
}

bool vgpu_samples_collect(CUcontext context, void (*each)(const struct vgpu_sample *, uint64_t gpu_ns)) {
    __typeof__(&cuEventQuery) query = DRIVER(cuEventQuery);
    if (vgpu_any_capture() || !query || !vgpu_spin_try(&lock))
        return true;
    struct sampler *sampler = sampler_of(context, false);
    struct vgpu_sample **at = sampler ? &sampler->first : NULL;
    unsigned unfinished = 0;
    CUstreamCaptureMode mode = at && *at ? relax() : CU_STREAM_CAPTURE_MODE_RELAXED;
    bool relaxed = at && *at;
    while (at && *at && unfinished < MAX_UNFINISHED) {
        struct vgpu_sample *sample = *at;
        CUresult state = query(sample->after);
        if (state == CUDA_ERROR_NOT_READY) {
            unfinished++;
            at = &sample->next;
            continue;
        }
        *at = sample->next;
        if (sampler->last == &sample->next)
            sampler->last = at;
        atomic_fetch_sub(&vgpu_samples_outstanding, 1);
        uint64_t gpu_ns = state == CUDA_SUCCESS ? measure(sampler, sample) : 0;
        if (gpu_ns)
            each(sample, gpu_ns);
        atomic_fetch_sub(&sample->cost->flying, 1);
        set_aside(sampler, sample);
    }
    if (relaxed)
        restore(mode);
    bool waiting = sampler && sampler->first;
    vgpu_spin_unlock(&lock);
    return waiting;
}

void vgpu_samples_drop(CUcontext context) {
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(context, false);
    if (sampler) {
        struct vgpu_sample *lists[] = {sampler->first, sampler->spare};
        for (unsigned i = 0; i < 2; i++) {
            while (lists[i]) {
                struct vgpu_sample *next = lists[i]->next;
                if (i == 0) {
                    atomic_fetch_sub(&lists[i]->cost->flying, 1);
                    atomic_fetch_sub(&vgpu_samples_outstanding, 1);
                }
                free(lists[i]);
                lists[i] = next;
            }
        }
        sampler->context = NULL;
    }
    vgpu_spin_unlock(&lock);
}
