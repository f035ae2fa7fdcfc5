/* Records pairs of events around launches and collects their times. */
#define _GNU_SOURCE
#include "pacer/samples.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/spin.h"
#include "ledger/charge.h"
#include "pacer/owed.h"
#include "pacer/sampler.h"
#include "reserves/capture.h"

#define MAX_SAMPLES 256u /* event pairs per context; further launches are bounded */
/* after this many busy streams a collection gives up; the next one begins with other streams */
#define MAX_UNFINISHED 16u
#define PART_NS 1000000u /* a running bounded launch pays in parts of this length */
/* if the library cannot query a launch's stream, the launch counts as ended after this time */
#define LOST_NS 10000000000u

atomic_int vgpu_samples_outstanding;
static struct sampler *samplers;
/* for all samplers; the holder calls the driver, so other threads only try to take the lock, or go on without it */
static vgpu_spin lock;
static __thread __attribute__((tls_model("initial-exec"))) char this_thread;

void vgpu_samples_forget(void) {
    samplers = NULL;
    atomic_store(&vgpu_samples_outstanding, 0);
    atomic_store(&lock, 0);
}

static struct sampler *sampler_of(CUcontext context, bool make) {
    struct sampler *sampler = samplers;
    while (sampler && sampler->context != context)
        sampler = sampler->next;
    if (sampler || !make || !context || !(sampler = calloc(1, sizeof *sampler)))
        return sampler;
    sampler->context = context;
    sampler->last = &sampler->first;
    sampler->next = samplers;
    return samplers = sampler;
}

/* Enters a context: events belong to the context that is current when they are made. False: it cannot be entered. */
static bool enter(CUcontext context, bool *pushed) {
    CUcontext current = NULL;
    *pushed = false;
    if (DRIVER(cuCtxGetCurrent) && DRIVER(cuCtxGetCurrent)(&current) == CUDA_SUCCESS && current == context)
        return true;
    *pushed = DRIVER(cuCtxPushCurrent_v2) && DRIVER(cuCtxPopCurrent_v2) &&
              DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
    return *pushed;
}

static void leave(bool pushed) {
    CUcontext popped;
    if (pushed)
        DRIVER(cuCtxPopCurrent_v2)(&popped);
}

/* While a capture is open, a thread may record and query events only if the driver lets it relax its capture mode. */
static bool may_ask(void) {
    return !vgpu_any_capture() || DRIVER(cuThreadExchangeStreamCaptureMode);
}

static struct vgpu_sample *without_events(CUcontext context) {
    struct vgpu_sample *sample = calloc(1, sizeof *sample);
    if (sample)
        sample->context = context;
    return sample;
}

static void make_events(struct sampler *sampler, struct vgpu_sample *sample) {
    __typeof__(&cuEventCreate) create = DRIVER(cuEventCreate);
    if (sampler->count >= MAX_SAMPLES || !create || create(&sample->before, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return;
    if (create(&sample->after, CU_EVENT_DEFAULT) == CUDA_SUCCESS) {
        sampler->count++;
    } else { /* only half of the pair exists */
        if (DRIVER(cuEventDestroy_v2))
            DRIVER(cuEventDestroy_v2)(sample->before);
        sample->before = NULL;
    }
}

static void set_aside(struct sampler *sampler, struct vgpu_sample *sample) {
    if (!sample->before || !sampler->context) {
        free(sample);
        return;
    }
    sample->next = sampler->spare;
    sampler->spare = sample;
}

static struct vgpu_sample *take_spare(struct sampler *sampler) {
    struct vgpu_sample *sample = sampler->spare;
    if (sample)
        sampler->spare = sample->next;
    return sample;
}

static void renew(struct vgpu_sample *sample) {
    const CUcontext context = sample->context;
    const CUevent before = sample->before, after = sample->after;
    *sample = (struct vgpu_sample){.context = context, .before = before, .after = after};
}

/* The launch of a sample is no longer under way. */
static void landed(struct vgpu_sample *sample) {
    vgpu_cost_landed(sample->cost, sample->recorded_ns);
    if (sample->first)
        vgpu_unknown_end(sample->card);
    if (sample->unknown)
        vgpu_owed_end(sample->card);
}

/* Reads CUDA_LAUNCH_BLOCKING at the first launch, when the driver has read it too: later changes have no effect. If it
 * was set too late, events bound the launch as usual (vgpu_measure_bounds). */
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
    bool pushed = false, asked = record && may_ask() && !vgpu_capture_unclear(stream);
    if (!must && !vgpu_spin_try(&lock))
        return NULL;
    if (must)
        vgpu_spin_lock(&lock);
    CUstreamCaptureMode mode = asked ? vgpu_relax() : CU_STREAM_CAPTURE_MODE_RELAXED;
    struct sampler *sampler = sampler_of(context, true);
    asked = asked && sampler && !sampler->leaving && enter(context, &pushed);
    struct vgpu_sample *sample = asked ? take_spare(sampler) : NULL;
    if (sample) {
        renew(sample);
    } else if ((sample = sampler ? without_events(context) : NULL) && asked) {
        make_events(sampler, sample);
    }
    vgpu_spin_unlock(&lock);
    if (sample) {
        sample->stream = stream;
        sample->thread = &this_thread;
        sample->recorded_ns = vgpu_now_ns();
        sample->bounded = !asked || !sample->before || record(sample->before, stream) != CUDA_SUCCESS;
    }
    leave(pushed);
    if (asked)
        vgpu_restore(mode);
    if (sample) {
        sample->blocks = launches_block();
        sample->launched_ns = vgpu_now_ns();
    }
    return sample;
}

static void put(struct sampler *sampler, struct vgpu_sample *sample) {
    sample->next = NULL;
    *sampler->last = sample;
    sampler->last = &sample->next;
    atomic_fetch_add(&vgpu_samples_outstanding, 1);
}

/* Records one more event behind the second one, to measure the cost of an event. */
static void probe(struct vgpu_sample *sample) {
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(sample->context, false);
    const bool mine = sampler && !sampler->leaving && !sampler->probing &&
                      (sampler->probe || DRIVER(cuEventCreate)(&sampler->probe, CU_EVENT_DEFAULT) == CUDA_SUCCESS);
    const CUevent event = mine ? sampler->probe : NULL;
    if (mine)
        sampler->probing = sample;
    vgpu_spin_unlock(&lock);
    if (mine && DRIVER(cuEventRecord)(event, sample->stream) == CUDA_SUCCESS)
        sample->probed_ns = vgpu_now_ns();
}

void vgpu_sample_end(struct vgpu_sample *sample, bool launched) {
    bool pushed = false;
    sample->returned_ns = vgpu_now_ns();
    if (launched && !sample->bounded) {
        CUstreamCaptureMode mode = vgpu_relax();
        sample->bounded =
            !enter(sample->context, &pushed) || DRIVER(cuEventRecord)(sample->after, sample->stream) != CUDA_SUCCESS;
        if (!sample->bounded && vgpu_events_uncalibrated(sample->card))
            probe(sample);
        leave(pushed);
        vgpu_restore(mode);
    }
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(sample->context, false);
    if (launched) {
        if (!sampler) { /* the context was destroyed meanwhile, with all its work */
            sample->bounded = true;
            sample->over_ns = sample->returned_ns;
            sample->before = sample->after = NULL;
            sampler = sampler_of(sample->context, true);
        }
        if (sampler)
            put(sampler, sample);
    } else {
        landed(sample);
        if (sampler)
            set_aside(sampler, sample);
        else
            free(sample);
    }
    vgpu_spin_unlock(&lock);
}

/* Whether the launch has ended. Sets over_ns of a bounded launch that has ended. */
static bool finished(struct vgpu_sample *sample, uint64_t now) {
    CUresult state = CUDA_ERROR_NOT_READY;
    if (sample->over_ns)
        return true;
    if (!sample->bounded) {
        state = DRIVER(cuEventQuery) ? DRIVER(cuEventQuery)(sample->after) : CUDA_ERROR_NOT_SUPPORTED;
        if (state == CUDA_SUCCESS || state == CUDA_ERROR_NOT_READY)
            return state == CUDA_SUCCESS;
        sample->bounded = true; /* the event has failed: query the stream instead */
    }
    if (sample->lost)
        state = now - sample->recorded_ns > LOST_NS ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    else if ((sample->stream != CU_STREAM_PER_THREAD || sample->thread == &this_thread) &&
             !vgpu_capture_unclear(sample->stream))
        state = DRIVER(cuStreamQuery) ? DRIVER(cuStreamQuery)(sample->stream) : CUDA_SUCCESS;
    if (state != CUDA_ERROR_NOT_READY)
        sample->over_ns = now;
    return sample->over_ns != 0;
}

static void give(struct sampler *sampler, struct vgpu_sample *sample, uint64_t now, vgpu_sample_taker *each) {
    struct vgpu_measure result = {0};
    if (sample->bounded || !vgpu_sample_measure(sampler, sample, &result)) {
        sample->bounded = true;
        vgpu_sample_bound(sampler, sample, sample->over_ns ? sample->over_ns : now, &result);
    }
    each(sample, &result);
}

/* Gives the time that a running bounded launch has taken so far. */
static void give_part(struct sampler *sampler, struct vgpu_sample *sample, uint64_t now, vgpu_sample_taker *each) {
    struct vgpu_measure result;
    if (!sample->bounded || now < sample->launched_ns + PART_NS)
        return;
    vgpu_sample_bound(sampler, sample, now, &result);
    result.partly = true;
    each(sample, &result);
    sample->reserved_ns -= sample->reserved_ns < result.fresh_ns ? sample->reserved_ns : result.fresh_ns;
    sample->launched_ns = now;
}

struct busy_streams {
    unsigned count;
    struct {
        CUstream stream;
        const void *thread;
    } at[MAX_UNFINISHED];
};

static bool is_busy(const struct busy_streams *busy, const struct vgpu_sample *sample) {
    for (unsigned i = 0; i < busy->count; i++)
        if (busy->at[i].stream == sample->stream &&
            (sample->stream != CU_STREAM_PER_THREAD || busy->at[i].thread == sample->thread))
            return true;
    return false;
}

/* Collects from one context. Behind an unfinished sample, no other sample of the same stream is asked. Streams may stay
 * busy for long, so the next collection begins where this one gave up. */
static void collect_in(struct sampler *sampler, vgpu_sample_taker *each) {
    struct busy_streams busy = {.count = 0};
    struct vgpu_sample **at = &sampler->first;
    const uint64_t now = vgpu_now_ns();
    while (*at && busy.count < MAX_UNFINISHED) {
        struct vgpu_sample *sample = *at;
        if (!sample->over_ns && is_busy(&busy, sample)) {
            at = &sample->next;
            continue;
        }
        if (!finished(sample, now)) {
            give_part(sampler, sample, now, each);
            busy.at[busy.count].stream = sample->stream;
            busy.at[busy.count++].thread = sample->thread;
            at = &sample->next;
            continue;
        }
        *at = sample->next;
        if (sampler->last == &sample->next)
            sampler->last = at;
        atomic_fetch_sub(&vgpu_samples_outstanding, 1);
        give(sampler, sample, now, each);
        if (sampler->probing == sample)
            sampler->probing = NULL;
        landed(sample);
        set_aside(sampler, sample);
    }
    if (*at && at != &sampler->first) {
        *sampler->last = sampler->first;
        sampler->first = *at;
        *at = NULL;
        sampler->last = at;
    }
}

/* No thread can enter the context, which was destroyed without notice. The context's work no longer runs, and the
 * library cannot query the work's state. */
static void give_up(struct sampler *sampler) {
    const uint64_t now = vgpu_now_ns();
    for (struct vgpu_sample *sample = sampler->first; sample; sample = sample->next) {
        sample->bounded = true;
        sample->over_ns = sample->over_ns ? sample->over_ns : now;
    }
}

bool vgpu_samples_collect(vgpu_sample_taker *each, bool must) {
    if (!may_ask() || (!must && !vgpu_spin_try(&lock)))
        return true;
    if (must)
        vgpu_spin_lock(&lock);
    bool waiting = false;
    CUstreamCaptureMode mode = vgpu_relax();
    for (struct sampler **at = &samplers; *at;) {
        struct sampler *sampler = *at;
        bool pushed = false;
        if (sampler->first && !sampler->leaving) {
            if (sampler->context && !enter(sampler->context, &pushed))
                give_up(sampler);
            collect_in(sampler, each);
            leave(pushed);
        }
        waiting |= sampler->first != NULL;
        if (!sampler->context && !sampler->first) {
            *at = sampler->next;
            free(sampler);
        } else {
            at = &sampler->next;
        }
    }
    vgpu_restore(mode);
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

/* With the lock held. The events of the context have become invalid. */
static void forget_events(struct sampler *sampler) {
    sampler->context = NULL;
    for (struct vgpu_sample *sample = sampler->first; sample; sample = sample->next) {
        sample->bounded = true;
        sample->before = sample->after = NULL;
    }
    while (sampler->spare)
        free(take_spare(sampler));
}

static void end_of(CUcontext context, bool gone, bool over) {
    if (!context)
        return;
    vgpu_spin_lock(&lock);
    struct sampler *sampler = sampler_of(context, false);
    if (sampler && sampler->leaving)
        sampler->leaving--;
    if (sampler && gone) {
        forget_events(sampler);
        if (over)
            give_up(sampler);
        for (struct vgpu_sample *sample = sampler->first; sample; sample = sample->next)
            sample->lost = true;
    }
    vgpu_spin_unlock(&lock);
}

void vgpu_samples_went(CUcontext context, bool gone) {
    end_of(context, gone, true);
}

void vgpu_samples_detached(CUcontext context, bool gone) {
    end_of(context, gone, false);
}

void vgpu_samples_stream_going(CUstream stream) {
    vgpu_own_tables();
    vgpu_owed_stream_going(stream);
    if (!atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed))
        return;
    vgpu_spin_lock(&lock);
    for (struct sampler *sampler = samplers; sampler; sampler = sampler->next)
        for (struct vgpu_sample *sample = sampler->first; sample; sample = sample->next)
            sample->lost |=
                sample->stream == stream && (stream != CU_STREAM_PER_THREAD || sample->thread == &this_thread);
    vgpu_spin_unlock(&lock);
}
