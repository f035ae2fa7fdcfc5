/* Marks behind the work that threads have handed to their own streams. */
#include "gate/stream_marks.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "gate/streams.h"
#include "ledger/charge.h"
#include "reserves/capture.h"

/* most calls that may stand before a mark: a driver whose queue is full (1,024 launches) waits for room */
#define MOST_BEFORE 512u
#define AGAIN_NS 50000u      /* time between two checks whether a mark has been recorded */
#define SETTLED_NS 10000000u /* a driver that has not answered by then is past its check for captures */

/* One event per context, recorded behind all work of the context. A later check asks it: no card passes a new event at
 * once. */
static struct mark {
    struct mark *next;
    CUcontext context;
    CUevent event;
    bool recorded; /* and not yet seen to have passed */
    bool late;     /* too much work stood before the mark to record it with the gate closed */
    /* a thread without the lock is recording it; the destruction of the context waits for that thread */
    bool recording;
    bool going;                   /* the context is being destroyed */
    struct vgpu_stream_wait wait; /* the work before the mark */
} *marks;

static atomic_uint recording;

void vgpu_marks_forget(void) {
    marks = NULL;
    atomic_store(&recording, 0);
}

static struct mark *find_mark(CUcontext context) {
    struct mark *mark = marks;
    while (mark && mark->context != context)
        mark = mark->next;
    return mark;
}

void vgpu_mark_going(CUcontext context) {
    struct mark *mark = find_mark(context);
    if (mark)
        mark->going = true;
    while (mark && mark->recording) {
        vgpu_streams_unlock();
        vgpu_sleep_until(vgpu_now_ns() + AGAIN_NS);
        vgpu_streams_lock();
    }
}

static void drop_mark(CUcontext context) {
    struct mark **at = &marks, *mark = find_mark(context);
    while (*at && *at != mark)
        at = &(*at)->next;
    if (mark)
        *at = mark->next;
    free(mark);
}

void vgpu_mark_went(CUcontext context, bool gone) {
    if (gone)
        drop_mark(context);
    else if (find_mark(context))
        find_mark(context)->going = false;
}

static struct mark *mark_of(CUcontext context) {
    struct mark *made = find_mark(context);
    if (made)
        return made;
    made = calloc(1, sizeof *made);
    if (!made || !DRIVER(cuEventCreate) ||
        DRIVER(cuEventCreate)(&made->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        free(made);
        return NULL;
    }
    made->context = context;
    made->next = marks;
    marks = made;
    return made;
}

static bool passed(struct mark *mark) {
    const CUresult result = DRIVER(cuEventQuery)(mark->event);
    mark->recorded = result == CUDA_ERROR_NOT_READY;
    if (result == CUDA_SUCCESS)
        vgpu_context_finished(&mark->wait);
    return result == CUDA_SUCCESS;
}

static uint64_t calls_before(const struct mark *mark) {
    uint64_t calls = 0;
    for (unsigned i = 0; i < mark->wait.count; i++)
        calls += mark->wait.own[i].handed_in - atomic_load(&mark->wait.own[i].passage->finished);
    return calls;
}

/* The driver answers for other threads' own streams only together with all other work of the context (CUDA 12.5). */
bool vgpu_mark_idle(CUcontext context) {
    if (!DRIVER(cuCtxRecordEvent) || !DRIVER(cuEventQuery) || !vgpu_streams_enter(context))
        return false;
    struct mark *mark = mark_of(context);
    bool idle = mark && !mark->recording && (!mark->recorded || passed(mark));
    if (idle) {
        vgpu_context_waiting(&mark->wait, context); /* work handed in since the last mark */
        mark->late = calls_before(mark) > MOST_BEFORE;
        if (mark->wait.count)
            idle = !mark->late && DRIVER(cuCtxRecordEvent)(context, mark->event) == CUDA_SUCCESS && passed(mark);
    }
    vgpu_streams_leave();
    return idle;
}

/* Without the lock: the driver may block for any reason. */
static bool record(const struct mark *mark) {
    bool recorded = false;
    atomic_fetch_add(&recording, 1);
    const CUstreamCaptureMode mode = vgpu_relax();
    /* recording would break an open capture */
    if (atomic_load(&vgpu_open_captures) == 0 && vgpu_streams_enter(mark->context)) {
        recorded = DRIVER(cuCtxRecordEvent)(mark->context, mark->event) == CUDA_SUCCESS;
        vgpu_streams_leave();
    }
    vgpu_restore(mode);
    atomic_fetch_sub(&recording, 1);
    return recorded;
}

void vgpu_marks_settle(void) {
    if (!atomic_load(&recording))
        return;
    unsigned looks = 0;
    for (const uint64_t until = vgpu_now_ns() + SETTLED_NS; atomic_load(&recording) && vgpu_now_ns() < until;)
        vgpu_yield(&looks);
}

void vgpu_streams_mark_late(void) {
    vgpu_own_tables();
    if (!vgpu_streams_lock())
        return;
    struct mark *mark = marks;
    while (mark && (!mark->late || mark->going || mark->recording))
        mark = mark->next;
    if (mark) {
        vgpu_context_waiting(&mark->wait, mark->context);
        mark->recording = true;
        vgpu_streams_unlock();
        const bool recorded = record(mark);
        vgpu_streams_lock();
        mark->recorded = recorded;
        mark->recording = mark->late = false;
    }
    vgpu_streams_unlock();
}
