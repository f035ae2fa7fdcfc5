/* Marks behind what threads have handed in to streams of their own. */
#include "gate/stream_marks.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "gate/streams.h"
#include "ledger/charge.h"
#include "reserves/capture.h"

/* calls that may stand before a mark: a driver whose queue is full (1,024 launches) waits for room in it */
#define MOST_BEFORE 512u
#define AGAIN_NS 50000u      /* between two looks whether a mark has been recorded */
#define SETTLED_NS 10000000u /* a driver that has not answered by then is past its look for captures */

/* One event per context, recorded behind all that it was given. It is asked when it is looked again: no card passes one
 * at once. */
static struct mark {
    struct mark *next;
    CUcontext context;
    CUevent event;
    bool recorded; /* and not seen to have passed yet */
    bool late;     /* there was too much before it to record it with the gate closed */
    /* by a thread that has let go of the lock, and whom the end of the context waits for */
    bool recording;
    bool going;                   /* the context */
    struct vgpu_stream_wait wait; /* what it stands behind */
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

/* What other threads have handed in to streams of their own can only be asked for together with all else of the context
 * (CUDA 12.5). */
bool vgpu_mark_idle(CUcontext context) {
    if (!DRIVER(cuCtxRecordEvent) || !DRIVER(cuEventQuery) || !vgpu_streams_enter(context))
        return false;
    struct mark *mark = mark_of(context);
    bool idle = mark && !mark->recording && (!mark->recorded || passed(mark));
    if (idle) {
        vgpu_context_waiting(&mark->wait, context); /* what has come since */
        mark->late = calls_before(mark) > MOST_BEFORE;
        if (mark->wait.count)
            idle = !mark->late && DRIVER(cuCtxRecordEvent)(context, mark->event) == CUDA_SUCCESS && passed(mark);
    }
    vgpu_streams_leave();
    return idle;
}

/* Without the lock: the driver may wait, for whatever that waits for. */
static bool record(const struct mark *mark) {
    bool recorded = false;
    atomic_fetch_add(&recording, 1);
    const CUstreamCaptureMode mode = vgpu_relax();
    if (atomic_load(&vgpu_open_captures) == 0 && vgpu_streams_enter(mark->context)) { /* it would break one */
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
