/* Events. */
#include "cuda/driver.h"

#define RESOLUTION_NS 500u /* resolution of an event's time: cuda.h says about 0.5 us */

static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;
/* By card: events that wait for it, in the order of their recording. */
static struct {
    CUevent first, last;
} pending[SIM_CARDS];

CUresult cuEventCreate(CUevent *out, unsigned int flags) {
    ENTER_CONTEXT(context);
    if (!out || flags & ~7u || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent event = object_new(OBJECT_EVENT);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = context;
    event->flags = flags;
    *out = event;
    return CUDA_SUCCESS;
}

/* With pending_lock held. */
static void forget(CUevent event) {
    if (event->state != EVENT_PENDING)
        return;
    CUevent before = NULL, at = pending[event->card].first;
    while (at && at != event) {
        before = at;
        at = at->next_pending;
    }
    if (!at)
        return;
    if (before)
        before->next_pending = event->next_pending;
    else
        pending[event->card].first = event->next_pending;
    if (pending[event->card].last == event)
        pending[event->card].last = before;
}

static uint64_t measured(uint64_t time) {
    return time - time % RESOLUTION_NS;
}

/* Spends the time that the driver call takes on hardware. */
static void take_time(uint64_t begin, uint64_t cost) {
    while (cost && sim_now() < begin + cost)
        ;
}

/* With pending_lock held. Sets the time of an event whose work has ended, while the card still knows it. */
static bool settle(CUevent event) {
    if (event->state != EVENT_PENDING)
        return true;
    if (!sim_reached(&driver.sim, event->card, event->mark) || !host_done(event->host))
        return false;
    forget(event);
    uint64_t end = sim_reached_at(&driver.sim, event->card, event->mark);
    event->time = measured(end > event->recorded ? end : event->recorded);
    event->state = EVENT_DONE;
    return true;
}

/* Called before every launch. A card keeps the end of a launch only until SIM_RING later launches. At most
 * SIM_IN_FLIGHT launches are open, so an event behind an unfinished launch still gets its time early enough. */
void events_settle(void) {
    pthread_mutex_lock(&pending_lock);
    for (int card = 0; card < SIM_CARDS; card++)
        while (pending[card].first && settle(pending[card].first))
            ;
    pthread_mutex_unlock(&pending_lock);
}

void events_settle_some(int card) {
    if (pending[card].first)
        events_settle();
}

static CUresult event_check(CUevent event) {
    ENTER();
    return object_is(event, OBJECT_EVENT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventDestroy_v2(CUevent event) {
    INJECT();
    CUresult result = event_check(event);
    if (result)
        return result;
    pthread_mutex_lock(&pending_lock);
    forget(event);
    pthread_mutex_unlock(&pending_lock);
    object_free(event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    INJECT();
    return cuEventDestroy_v2(event);
}

/* Sets the work that an event stands for; `done`: that work has ended already. */
static void note(CUevent event, CUcontext context, struct sim_mark mark, uint64_t host, uint64_t not_before,
                 uint64_t planned, uint64_t now, bool done) {
    pthread_mutex_lock(&pending_lock);
    forget(event);
    event->capture = NULL;
    event->mark = mark;
    event->host = host;
    event->not_before = not_before;
    event->planned = planned;
    event->recorded = not_before > now ? not_before : now;
    event->time = measured(event->recorded);
    event->state = done ? EVENT_DONE : EVENT_PENDING;
    event->card = context->card;
    if (!done) {
        event->next_pending = NULL;
        if (pending[event->card].last)
            pending[event->card].last->next_pending = event;
        else
            pending[event->card].first = event;
        pending[event->card].last = event;
    }
    pthread_mutex_unlock(&pending_lock);
}

void event_record_all(CUevent event, CUcontext context, uint64_t last) {
    struct sim_mark mark = {0, last};
    events_settle_some(context->card);
    note(event, context, mark, context->host, context->copied, 0, sim_now() + driver.sim.timing.launch_ns,
         sim_reached(&driver.sim, context->card, mark) && host_done(context->host) && context->copied <= sim_now());
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags) {
    INJECT();
    CUstream stream;
    CUresult result = event_check(event);
    if (!result)
        result = stream_resolve(handle, &stream);
    if (result)
        return result;
    if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    result = capture_record(stream, event);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    uint64_t begin = sim_now(), now = begin + driver.sim.timing.launch_ns;
    struct sim_mark mark = stream_mark(stream);
    uint64_t cost = event->flags & CU_EVENT_DISABLE_TIMING ? 0 : driver.sim.timing.event_ns,
             copied = stream_not_before(stream);
    if (cost && copied > now) {
        now = copied + cost; /* behind a copy the event takes no turn: it would delay later launches of other streams */
    } else if (cost) {
        events_settle_some(stream->context->card);
        mark = (struct sim_mark){stream_occupy(stream, cost, 0, 0), 0};
    }
    note(event, stream->context, mark, stream->host, stream_not_before(stream), stream_planned(stream), now,
         stream_ended(stream));
    take_time(begin, driver.sim.timing.record_ns);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    INJECT();
    return cuEventRecordWithFlags(event, stream, 0);
}

static bool event_done(CUevent event) {
    pthread_mutex_lock(&pending_lock);
    bool done = settle(event);
    pthread_mutex_unlock(&pending_lock);
    return done && (event->state == EVENT_FRESH || event->time <= sim_now());
}

CUresult cuEventQuery(CUevent event) {
    INJECT();
    CUresult result = event_check(event);
    if (!result && event->capture)
        result = CUDA_ERROR_CAPTURED_EVENT;
    if (!result)
        result = capture_forbids(NULL);
    if (result)
        return result;
    uint64_t begin = sim_now();
    bool done = event_done(event);
    take_time(begin, driver.sim.timing.query_ns);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    INJECT();
    CUresult result = event_check(event);
    if (!result && event->capture)
        result = CUDA_ERROR_CAPTURED_EVENT;
    if (!result)
        result = capture_forbids(NULL);
    if (result)
        return result;
    pthread_mutex_lock(&pending_lock);
    bool wait = event->state == EVENT_PENDING;
    struct sim_mark mark = event->mark;
    uint64_t host = event->host;
    pthread_mutex_unlock(&pending_lock);
    if (wait) {
        sim_wait_mark(&driver.sim, event->card, mark);
        host_wait(host);
    }
    while (!event_done(event) && sim_self_valid(&driver.sim))
        sim_sleep_until(event->time);
    events_settle();
    if (event->context)
        pools_trim(event->context->card);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    INJECT();
    CUresult result = event_check(start);
    if (!result)
        result = event_check(end);
    if (result || !milliseconds)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || start->state == EVENT_FRESH ||
        end->state == EVENT_FRESH)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->time - start->time) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    INJECT();
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

void event_wait_by(CUevent event, int card, _Atomic uint64_t *waits, _Atomic uint64_t *until) {
    if (event_done(event) || !event->context)
        return;
    if (event->context->card == card) {
        /* if kernels run side by side, the wait covers more than the event: all work launched before it */
        raise_to(waits, event->mark.launch > event->mark.prefix ? event->mark.launch : event->mark.prefix);
        raise_to(until, event->not_before);
    } else {
        uint64_t end = sim_expected_end(&driver.sim, event->context->card, event->mark);
        raise_to(until, end > event->not_before ? end : event->not_before);
    }
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result)
        result = event_check(event);
    if (result)
        return result;
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    result = capture_wait(stream, event);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    if (event_done(event) || !event->context)
        return CUDA_SUCCESS;
    if (event->context->card == stream->context->card) {
        raise_to(&stream->planned, event->planned);
        if (event->host > stream->host)
            stream->host = event->host;
    }
    event_wait_by(event, stream->context->card, &stream->waits, &stream->not_before);
    return CUDA_SUCCESS;
}
