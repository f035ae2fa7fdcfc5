/* Measures launches by pairs of events around them. Asynchronous: results are collected later, and no thread ever waits
 * for the card.
 *
 * Sometimes events cannot be used: none can be made, the driver refuses one, a capture must not be disturbed, or the
 * context or stream is destroyed. Then the launch is *bounded*: it took no longer than from its launch until its stream
 * was seen idle. For every reason the path is the same: the sample is collected like others and is marked as
 * bounded. */
#ifndef VGPU_SAMPLES_H
#define VGPU_SAMPLES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"
#include "pacer/costs.h"
#include "vgpu/region.h"

enum vgpu_sample_kind {
    VGPU_SAMPLE_LEARNS,   /* one of many launches: only the estimate uses it */
    VGPU_SAMPLE_SETTLES,  /* every launch of its kind is measured and pays its real time */
    VGPU_SAMPLE_INSPECTS, /* the same, but only because of an inspection: inspect.h */
    VGPU_SAMPLE_COVERS,   /* begins a series: earlier work may fall into it */
};

struct vgpu_sample {
    struct vgpu_sample *next;
    CUcontext context;
    CUstream stream;
    /* the thread that owns the stream, if it is CU_STREAM_PER_THREAD: only that thread can ask about it */
    const void *thread;
    bool bounded;     /* no events tell when the launch ran */
    bool lost;        /* and its stream cannot be asked any more */
    bool unknown;     /* nothing was known of such launches: see owed.h */
    bool first;       /* the one unknown launch for which others wait */
    uint64_t over_ns; /* the launch had ended by then; 0: it may still run */
    /* GPU time charged to the process on this card before, including this launch's payment */
    uint64_t spent_ns;
    uint32_t others; /* further cards on which the launch runs: bit by index in the limits */
    CUevent before, after;
    struct vgpu_cost *cost;
    enum vgpu_sample_kind kind;
    uint32_t meaning;     /* `meaning` of the cost's key at the launch */
    uint64_t reserved_ns; /* what the launch has paid */
    uint64_t apart_ns;    /* mean time between launches of its thread */
    /* CLOCK_MONOTONIC ns: just before the first event was recorded, just before the launch, and just after the launch
     * (before the second event was recorded) */
    uint64_t recorded_ns, launched_ns, returned_ns;
    uint64_t probed_ns; /* when a third event had been recorded behind the second; 0: none */
    bool blocks;        /* the launch call returns after its kernel has ended: CUDA_LAUNCH_BLOCKING */
    uint32_t limit;     /* percent at which the launch was paid; 0: not paced */
    uint32_t card;
};

/* The result of a sample: when the kernel ran. CLOCK_MONOTONIC ns, exact to a few microseconds. For a spoilt or a short
 * sample, the time is a guess between proven bounds. */
struct vgpu_measure {
    uint64_t begin_ns, end_ns;
    uint64_t took_ns;  /* the part that no earlier event-measured sample of this context covers */
    uint64_t fresh_ns; /* the part that no earlier sample covers: the most that a bounded sample must pay */
    bool queued;       /* the launch began where earlier work of its stream ended: it waited for no other process */
    bool spoilt;       /* the host was delayed between the steps: the launch may have been much shorter */
    bool bounded;      /* only `most_ns` is known */
    bool partly;       /* the launch still runs: for a bounded sample, the time so far */
    uint64_t least_ns; /* the launch took at least this long */
    uint64_t most_ns;  /* the launch took at most this long: all the time in which it can have run */
};

static inline bool vgpu_sample_settles(const struct vgpu_sample *sample) {
    return sample->kind == VGPU_SAMPLE_SETTLES || sample->kind == VGPU_SAMPLE_INSPECTS;
}

/* True if even a spoilt measurement proves the payment wrong, for a launch that pays its real time. So a short launch
 * among long ones, paid at their mean, gets the difference back on a busy machine too. For short launches paid as
 * short, the mean is the better guess. */
static inline bool vgpu_measure_refutes(const struct vgpu_measure *measure, const struct vgpu_sample *sample) {
    const uint64_t paid = sample->reserved_ns, most = measure->most_ns;
    return vgpu_sample_settles(sample) && (paid >= VGPU_LONG_RUN_NS || most >= VGPU_LONG_RUN_NS) &&
           (paid > most || paid < measure->least_ns);
}

/* Whether an estimate uses a measurement. It never learns from bounds: the bounds that prove a payment wrong are not
 * typical, so an estimate from them alone would drift. Also, a kernel's first launch may include the time to load its
 * code. */
static inline bool vgpu_measure_teaches(const struct vgpu_measure *measure) {
    return !measure->spoilt;
}

/* Samples of all contexts whose result is not yet collected. At 0 there is nothing to do. */
extern atomic_int vgpu_samples_outstanding;

/* Records the first event, or remembers when the launch began. `context` is the stream's context; it need not be
 * current. NULL: the machine has no memory left, or `must` is false and another thread is collecting. */
struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream, bool must);
/* Records the second event behind the launch and leaves the sample for collection. launched false: there was no
 * launch. */
void vgpu_sample_end(struct vgpu_sample *sample, bool launched);
typedef void vgpu_sample_taker(struct vgpu_sample *, const struct vgpu_measure *);
/* Gives every finished sample of all contexts to `each`. For a running bounded sample, gives the time since the last
 * call. False: no sample is under way. `must`: also while another thread is collecting. */
bool vgpu_samples_collect(vgpu_sample_taker *each, bool must);
/* Around a call that may destroy a context and its events. If it does, the work of the context has ended. */
void vgpu_samples_going(CUcontext context);
void vgpu_samples_went(CUcontext context, bool gone);
/* The same for a green context: its work goes on, but the driver cannot be asked about it. */
void vgpu_samples_detached(CUcontext context, bool gone);
/* A stream is being destroyed, or a thread ends with its own stream (CU_STREAM_PER_THREAD). The stream's work may go
 * on. */
void vgpu_samples_stream_going(CUstream stream);
/* In a forked child: process.h. */
void vgpu_samples_forget(void);
#endif
