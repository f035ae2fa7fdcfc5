/* Measuring launches by pairs of events around them. Asynchronous: results are collected later, nothing ever waits for
 * the card.
 *
 * Where that cannot be (no events to be had, a driver that refuses one, a capture that must not be disturbed, a context
 * or stream that has gone) the launch is *bounded*: it took no longer than from its launch until its stream was seen to
 * have nothing left to do. Whatever the reason, that goes one way: such a sample is collected like others, and says so.
 */
#ifndef VGPU_SAMPLES_H
#define VGPU_SAMPLES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"
#include "pacer/costs.h"
#include "vgpu/region.h"

enum vgpu_sample_kind {
    VGPU_SAMPLE_LEARNS,   /* one of many launches: only the estimate learns of it */
    VGPU_SAMPLE_SETTLES,  /* every launch of its kind is measured, and pays what it took */
    VGPU_SAMPLE_INSPECTS, /* the same, only because of an inspection: inspect.h */
    VGPU_SAMPLE_COVERS,   /* begins a series: what ran before it may be in it */
};

struct vgpu_sample {
    struct vgpu_sample *next;
    CUcontext context;
    CUstream stream;
    /* whose own stream that is, where it is CU_STREAM_PER_THREAD: only that thread can ask for it */
    const void *thread;
    bool bounded;     /* no events tell when it ran */
    bool lost;        /* nor can its stream be asked any more */
    bool unknown;     /* nothing was known of launches like it: see owed.h */
    bool first;       /* the one unknown launch that others wait for */
    uint64_t over_ns; /* it had ended by then; 0: it may be running */
    /* GPU time that the process had been charged on the card before, with what this launch has paid */
    uint64_t spent_ns;
    uint32_t others; /* further cards that it runs on: bit by index in the limits */
    CUevent before, after;
    struct vgpu_cost *cost;
    enum vgpu_sample_kind kind;
    uint32_t meaning;     /* of its cost's key when it was launched */
    uint64_t reserved_ns; /* what the launch has paid */
    uint64_t apart_ns;    /* mean time between launches of its thread */
    /* CLOCK_MONOTONIC ns: just before the first event was recorded, before the launch, after it and so before the
     * second event was recorded */
    uint64_t recorded_ns, launched_ns, returned_ns;
    uint64_t probed_ns; /* a third event had been recorded behind the second one; 0: none */
    bool blocks;        /* launches return when their kernels have ended: CUDA_LAUNCH_BLOCKING */
    uint32_t limit;     /* percent it was paid at; 0: not paced */
    uint32_t card;
};

/* What became of a sample; CLOCK_MONOTONIC ns, exact to a few microseconds. When the kernel ran, as well as can be
 * told: of a spoilt one, or a short one, that is a guess between what is proven. */
struct vgpu_measure {
    uint64_t begin_ns, end_ns;
    uint64_t took_ns;  /* part of that which no earlier sample of this context covers that events have measured */
    uint64_t fresh_ns; /* and which no earlier one covers at all: what a bounded one has to pay at most */
    bool queued;       /* it began where earlier work of its stream ended: it waited for nobody else */
    bool spoilt;       /* the host was away in between: it may have been much shorter */
    bool bounded;      /* nothing is known but `most_ns` */
    bool partly;       /* it still runs: of a bounded one, what has passed so far */
    uint64_t least_ns; /* but it took so long at least */
    uint64_t most_ns;  /* and at most: the whole time in which it can have run */
};

static inline bool vgpu_sample_settles(const struct vgpu_sample *sample) {
    return sample->kind == VGPU_SAMPLE_SETTLES || sample->kind == VGPU_SAMPLE_INSPECTS;
}

/* Whether a spoilt measurement of a launch that pays what it took still shows that it did not take what was paid for
 * it: a short one among long ones, paid as their mean, gets the difference back on a busy machine too. Of short
 * launches that were paid as such the mean is the better guess. */
static inline bool vgpu_measure_refutes(const struct vgpu_measure *measure, const struct vgpu_sample *sample) {
    const uint64_t paid = sample->reserved_ns, most = measure->most_ns;
    return vgpu_sample_settles(sample) && (paid >= VGPU_LONG_RUN_NS || most >= VGPU_LONG_RUN_NS) &&
           (paid > most || paid < measure->least_ns);
}

/* Whether an estimate learns of a measurement: not of bounds. Those that show a payment to be wrong are not as long as
 * others: who learned of them alone would go astray; and the first launch of a kernel may be as long as its code took
 * to load. */
static inline bool vgpu_measure_teaches(const struct vgpu_measure *measure) {
    return !measure->spoilt;
}

/* Samples whose result nobody has collected yet, of all contexts: nothing to do while it is 0. */
extern atomic_int vgpu_samples_outstanding;

/* Records the first event, or remembers when the launch began. `context`: the stream's; it need not be current. NULL:
 * not `must`, and somebody else is collecting; or the machine has no memory left. */
struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream, bool must);
/* Records the second event behind the launch and leaves the sample to be collected; launched false: there was no
 * launch. */
void vgpu_sample_end(struct vgpu_sample *sample, bool launched);
typedef void vgpu_sample_taker(struct vgpu_sample *, const struct vgpu_measure *);
/* Gives every finished sample, of all contexts, to `each`; and of bounded ones that run, what has passed since the last
 * time. Returns false if none is under way. `must`: even if somebody else is collecting. */
bool vgpu_samples_collect(vgpu_sample_taker *each, bool must);
/* Around a call that may destroy a context, and its events with it. What was under way there has then ended. */
void vgpu_samples_going(CUcontext context);
void vgpu_samples_went(CUcontext context, bool gone);
/* The same for a green context, whose work goes on and cannot be asked for. */
void vgpu_samples_detached(CUcontext context, bool gone);
/* A stream goes, or a thread with its own one (stream CU_STREAM_PER_THREAD); its work may go on. */
void vgpu_samples_stream_going(CUstream stream);
/* In a forked child: process.h. */
void vgpu_samples_forget(void);
#endif
