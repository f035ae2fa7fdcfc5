#define _GNU_SOURCE
#include "samples.h"

#include <stdlib.h>

#include "bounds.h"
#include "capture.h"
#include "clock.h"
#include "fork.h"
#include "runs.h"
#include "spin.h"

#define CONTEXTS 16u
#define MAX_SAMPLES 256u      /* per context: of events that exist at once */
#define MAX_UNFINISHED 8u     /* looked at before a collection gives up: streams finish in any order, but not in every order */
#define REBASE_MS 4000.0f     /* a float of milliseconds resolves 0.5 us up to here */
#define ORIGIN_NS 1e9          /* the first measurements lie before the first base */
#define DRIFT 1e-4             /* two clocks do not drift apart faster: one of 100 ppm is a bad one */

struct sampler {
    CUcontext context;        /* NULL: free */
    unsigned leaving;         /* calls under way that may destroy it, and its events with it: the driver is not asked about these */
    CUevent base;             /* on this context's time line, which counts ns from its first base; NULL: not yet */
    double base_ns;           /* where it lies */
    double lag;               /* CLOCK_MONOTONIC less time line, ns */
    uint64_t lag_ns;          /* as it was then; 0: not yet known */
    struct vgpu_spans covered; /* what samples have covered, on the time line, from ORIGIN_NS on */
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

static void give_back(struct vgpu_sample *sample) {
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(sample->context, false);
    if (sampler)
        set_aside(sampler, sample);
    vgpu_spin_unlock(&lock);
}

/* Asked when the driver has read it: what a program changes later has no effect, and whoever sets it in vain is taken for busy for longer, not
 * shorter. */
static bool launches_block(void) {
    static atomic_int state; /* 1: yes, 2: no */
    if (!atomic_load_explicit(&state, memory_order_relaxed)) {
        const char *asked = getenv("CUDA_LAUNCH_BLOCKING");
        atomic_store_explicit(&state, asked && atoi(asked) != 0 ? 1 : 2, memory_order_relaxed);
    }
    return atomic_load_explicit(&state, memory_order_relaxed) == 1;
}

struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream, bool must) {
    __typeof__(&cuEventRecord) record = DRIVER(cuEventRecord);
    if (vgpu_any_capture() || !record || (!must && !vgpu_spin_try(&lock)))
        return NULL;
    if (must)
        vgpu_spin_lock(&lock);
    CUstreamCaptureMode mode = vgpu_relax();
    struct sampler *sampler = sampler_of(context, true);
    struct vgpu_sample *sample = sampler && !sampler->leaving ? new_sample(sampler) : NULL;
    vgpu_spin_unlock(&lock);
    if (sample) {
        sample->recorded_ns = vgpu_now_ns();
        if (record(sample->before, stream) != CUDA_SUCCESS) {
            give_back(sample);
            sample = NULL;
        }
    }
    vgpu_restore(mode);
    if (sample) {
        sample->blocks = launches_block();
        sample->launched_ns = vgpu_now_ns();
    }
    return sample;
}

void vgpu_sample_end(struct vgpu_sample *sample, CUstream stream, bool launched) {
    sample->returned_ns = vgpu_now_ns();
    CUstreamCaptureMode mode = vgpu_relax();
    bool recorded = launched && DRIVER(cuEventRecord)(sample->after, stream) == CUDA_SUCCESS;
    if (recorded) {
        vgpu_spin_lock(&lock);
        struct sampler *sampler = sampler_of(sample->context, false);
        if (sampler) { /* else the context went meanwhile */
            sample->next = NULL;
            *sampler->last = sample;
            sampler->last = &sample->next;
            atomic_fetch_add(&vgpu_samples_outstanding, 1);
        }
        vgpu_spin_unlock(&lock);
    } else {
        vgpu_cost_landed(sample->cost, sample->recorded_ns);
        give_back(sample);
    }
    vgpu_restore(mode);
}

/* Makes the end of this sample, which lies at `where_ns`, the new base. */
static void rebase(struct sampler *sampler, struct vgpu_sample *sample, double where_ns) {
    CUevent old = sampler->base;
    if (!old && DRIVER(cuEventCreate)(&old, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return;
    sampler->base = sample->after;
    sampler->base_ns = where_ns;
    sample->after = old;
}

/* Our clock less the time line. On an idle stream an event happens a constant time after it was recorded, and a kernel begins as long after its
 * launch: that constant may stay in the difference. On a busy one it happens later, so that the largest difference is the right one, however long the
 * stream has been busy since. */
static double lag_of(struct sampler *sampler, const struct vgpu_sample *sample, double begin) {
    const double lag = (double)sample->recorded_ns - begin;
    const double known = sampler->lag - DRIFT * ((double)sample->recorded_ns - (double)sampler->lag_ns);
    if (!sampler->lag_ns || lag > known) {
        sampler->lag = lag;
        sampler->lag_ns = sample->recorded_ns;
        return lag - VGPU_RESOLUTION_NS / 2; /* times are cut off */
    }
    return known - VGPU_RESOLUTION_NS / 2;
}

static uint64_t on_line(uint64_t clock_ns, double lag) {
    const double line = (double)clock_ns - lag + ORIGIN_NS;
    return line > 0 ? (uint64_t)line : 0;
}

static bool measure(struct sampler *sampler, struct vgpu_sample *sample, struct vgpu_measure *out) {
    __typeof__(&cuEventElapsedTime) elapsed = DRIVER(cuEventElapsedTime);
    float whole_ms = 0, start_ms = 0;
    if (!elapsed || elapsed(&whole_ms, sample->before, sample->after) != CUDA_SUCCESS || !(whole_ms >= 0))
        return false;
    const double whole = (double)whole_ms * 1e6;
    double line = -whole;
    if (sampler->base) {
        if (elapsed(&start_ms, sampler->base, sample->before) != CUDA_SUCCESS)
            return false;
        line = sampler->base_ns + (double)start_ms * 1e6;
    }
    const double lag = lag_of(sampler, sample, line);
    vgpu_measure_bounds(sample, line + lag, whole, out);
    if (!sampler->base || start_ms + whole_ms > REBASE_MS)
        rebase(sampler, sample, line + whole);
    /* where our clock is thought to be relative to it may change from one sample to the next */
    out->fresh_ns = vgpu_spans_add(&sampler->covered, on_line(out->begin_ns, lag), on_line(out->end_ns, lag));
    return true;
}

bool vgpu_samples_collect(CUcontext context, void (*each)(const struct vgpu_sample *, const struct vgpu_measure *)) {
    __typeof__(&cuEventQuery) query = DRIVER(cuEventQuery);
    if (vgpu_any_capture() || !query || !vgpu_spin_try(&lock))
        return true;
    struct sampler *sampler = sampler_of(context, false);
    struct vgpu_sample **at = sampler && !sampler->leaving ? &sampler->first : NULL;
    unsigned unfinished = 0;
    CUstreamCaptureMode mode = at && *at ? vgpu_relax() : CU_STREAM_CAPTURE_MODE_RELAXED;
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
        struct vgpu_measure result;
        if (state == CUDA_SUCCESS && measure(sampler, sample, &result))
            each(sample, &result);
        vgpu_cost_landed(sample->cost, sample->recorded_ns);
        set_aside(sampler, sample);
    }
    if (relaxed)
        vgpu_restore(mode);
    bool waiting = sampler && sampler->first;
    vgpu_spin_unlock(&lock);
    return waiting;
}

void vgpu_samples_going(CUcontext context) {
    if (!context)
        return;
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(context, false);
    if (sampler)
        sampler->leaving++;
    vgpu_spin_unlock(&lock);
}

void vgpu_samples_went(CUcontext context, bool gone) {
    if (!context)
        return;
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(context, false);
    if (sampler && sampler->leaving)
        sampler->leaving--;
    if (sampler && gone) {
        struct vgpu_sample *lists[] = {sampler->first, sampler->spare};
        for (unsigned i = 0; i < 2; i++) {
            while (lists[i]) {
                struct vgpu_sample *next = lists[i]->next;
                if (i == 0) {
                    vgpu_cost_landed(lists[i]->cost, lists[i]->recorded_ns);
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
