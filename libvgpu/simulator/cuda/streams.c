/* Streams and events. A stream is the sequence of its last launch, and of one up to which it waits for all others. */
#include <string.h>

#include "cuda/driver.h"

#define RESOLUTION_NS 500u /* of an event's time: cuda.h says about 0.5 us */

static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;
/* Events that wait for a card, in the order of their recording. */
static struct {
    CUevent first, last;
} pending[SIM_CARDS];

CUstream stream_new(CUcontext context, unsigned flags, int priority)
{
    CUstream stream = object_new(OBJECT_UNFINISHED);
    if (stream) {
        stream->context = context;
        stream->flags = flags;
        stream->priority = priority;
        stream->id = driver_id();
        object_made(stream, OBJECT_STREAM);
    }
    return stream;
}

CUresult stream_resolve(CUstream handle, CUstream *out)
{
    ENTER_CONTEXT(context);
    if (!handle && thread_state()->own_default_stream)
        handle = CU_STREAM_PER_THREAD;
    if (!handle || handle == CU_STREAM_LEGACY) {
        *out = context->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        *out = stream_per_thread(context);
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = handle;
    return object_is(handle, OBJECT_STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* The legacy stream waits for all blocking streams. */
static struct sim_mark mark_of(CUstream stream)
{
    uint64_t blocking = stream == stream->context->legacy ? stream->context->last_blocking : 0;
    return (struct sim_mark){stream->last, blocking > stream->waits ? blocking : stream->waits};
}

uint64_t stream_last(CUstream stream)
{
    struct sim_mark mark = mark_of(stream);
    return mark.launch > mark.prefix ? mark.launch : mark.prefix;
}

/* Threads may launch on one stream at once. */
static void raise_to(_Atomic uint64_t *last, uint64_t sequence)
{
    uint64_t now = atomic_load_explicit(last, memory_order_relaxed);
    while (now < sequence && !atomic_compare_exchange_weak_explicit(last, &now, sequence, memory_order_relaxed, memory_order_relaxed))
        ;
}

/* As for the launches before it: the legacy stream waits for all blocking streams, and they for it. */
static uint64_t at_least(CUstream stream, uint64_t own, const _Atomic uint64_t *blocking, const _Atomic uint64_t *legacy)
{
    uint64_t other = stream == stream->context->legacy ? *blocking : stream->flags & CU_STREAM_NON_BLOCKING ? 0 : *legacy;
    return own > other ? own : other;
}

uint64_t stream_not_before(CUstream stream)
{
    return at_least(stream, stream->not_before, &stream->context->copied_blocking, &stream->context->legacy->not_before);
}

static uint64_t planned(CUstream stream)
{
    return at_least(stream, stream->planned, &stream->context->planned_blocking, &stream->context->legacy->planned);
}

/* A copy begins when the work before it is likely to have ended: by what the card says, and by what it cannot know, the copies that this work waits for. */
uint64_t stream_engine(CUstream stream, enum sim_engine_kind engine, uint64_t duration)
{
    CUcontext context = stream->context;
    host_wait(stream->host);
    uint64_t begin = sim_now() + driver.sim.timing.launch_ns;
    uint64_t others[] = {stream_not_before(stream), planned(stream), sim_expected_end(&driver.sim, context->card, mark_of(stream))};
    for (unsigned i = 0; i < 3; i++)
        begin = others[i] > begin ? others[i] : begin;
    uint64_t end = sim_engine(&driver.sim, context->card, engine, begin, duration);
    raise_to(&stream->not_before, end);
    raise_to(&context->copied, end);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        raise_to(&context->copied_blocking, end);
    return end;
}

void stream_follow(CUstream stream, CUstream other)
{
    uint64_t ends[] = {sim_expected_end(&driver.sim, other->context->card, mark_of(other)), stream_not_before(other), planned(other)};
    for (unsigned i = 0; i < 3; i++)
        raise_to(&stream->not_before, ends[i]);
}

void copies_wait(CUcontext context)
{
    for (uint64_t now = sim_now(); context->copied > now; now = sim_now())
        sim_sleep_until(context->copied);
}

/* When a kernel ends if its process has the card alone. */
static void plan(CUstream stream, uint64_t duration)
{
    static _Atomic uint64_t lanes[SIM_CARDS]; /* where kernels run one by one */
    _Atomic uint64_t *lane = &lanes[stream->context->card];
    uint64_t begin = sim_now() + driver.sim.timing.launch_ns, not_before = stream_not_before(stream), before = planned(stream);
    begin = not_before > begin ? not_before : begin;
    begin = before > begin ? before : begin;
    if (driver.sim.timing.kernels <= 1) {
        begin = *lane > begin ? *lane : begin;
        raise_to(lane, begin + duration);
    }
    raise_to(&stream->planned, begin + duration);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        raise_to(&stream->context->planned_blocking, begin + duration);
}

/* The share of the card that a kernel's blocks fill when they all run at once. */
static uint32_t width_of(const struct launch_shape *shape, uint64_t blocks)
{
    const struct sim_profile *profile = driver.sim.profile;
    uint64_t threads = (uint64_t)shape->block[0] * shape->block[1] * shape->block[2];
    uint64_t resident = (uint64_t)profile->threads_per_multiprocessor / (threads ? threads : 1);
    resident = (resident < (uint64_t)profile->blocks_per_multiprocessor ? resident : (uint64_t)profile->blocks_per_multiprocessor) *
               (uint64_t)profile->multiprocessors;
    return blocks < resident ? (uint32_t)(blocks * SIM_WHOLE / resident) : SIM_WHOLE;
}

CUresult stream_launch(CUstream stream, const struct launch_shape *shape)
{
    uint64_t blocks = (uint64_t)shape->grid[0] * shape->grid[1] * shape->grid[2];
    uint64_t duration = duration_next(&shape->function->duration, blocks, shape->argument);
    struct sim_mark after = mark_of(stream);
    CUcontext context = stream->context;
    if (pending[context->card].first)
        events_settle();
    host_wait(stream->host); /* the card cannot wait for a host function; the caller does */
    if (!(stream->flags & CU_STREAM_NON_BLOCKING) && stream != context->legacy && context->legacy->last > after.prefix)
        after.prefix = context->legacy->last;
    if (touch_matters(shape->function))
        duration += touch_launch(context, shape);
    if (driver.sim.timing.copies)
        plan(stream, duration);
    uint32_t width = driver.sim.timing.kernels > 1 ? width_of(shape, blocks) : SIM_WHOLE;
    uint64_t sequence = sim_launch(&driver.sim, context->card, duration, width, stream_not_before(stream), after);
    if (!sequence)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (shape->pointers)
        touch_note(context, shape, sequence);
    raise_to(&stream->last, sequence);
    raise_to(&context->last, sequence);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        raise_to(&context->last_blocking, sequence);
    return CUDA_SUCCESS;
}

static bool ended(CUstream stream)
{
    return sim_reached(&driver.sim, stream->context->card, mark_of(stream)) && host_done(stream->host) &&
           (!stream_not_before(stream) || stream_not_before(stream) <= sim_now());
}

CUresult stream_wait(CUstream stream)
{
    CUresult result = capture_forbids(stream);
    if (result)
        return result;
    sim_wait_mark(&driver.sim, stream->context->card, mark_of(stream));
    host_wait(stream->host);
    for (uint64_t now = sim_now(), until = stream_not_before(stream); until > now; now = sim_now())
        sim_sleep_until(until);
    sim_seen(&driver.sim); /* what it waited for may have run on another card */
    return CUDA_SUCCESS;
}

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    ENTER_CONTEXT(context);
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = stream_new(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags) { INJECT(); return create(out, flags, 0); }
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) { INJECT(); return create(out, flags, priority); }

/* Pending work goes on; the driver, too, only releases the handle. */
CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER();
    if (!object_is(stream, OBJECT_STREAM) || stream == stream->context->legacy)
        return CUDA_ERROR_INVALID_HANDLE;
    capture_abandon(stream);
    object_free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) { INJECT(); return cuStreamDestroy_v2(stream); }

CUresult cuStreamQuery(CUstream handle)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result)
        result = capture_forbids(stream);
    if (result)
        return result;
    bool done = ended(stream);
    if (done)
        events_settle();
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result)
        result = stream_wait(stream);
    if (!result) {
        events_settle();
        pools_trim(stream->context->card);
    }
    return result;
}

CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
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

/* Under pending_lock. */
static void forget(CUevent event)
{
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

static uint64_t measured(uint64_t time)
{
    return time - time % RESOLUTION_NS;
}

/* What a driver call costs on hardware is spent here. */
static void take_time(uint64_t begin, uint64_t cost)
{
    while (cost && sim_now() < begin + cost)
        ;
}

/* Under pending_lock: an event whose work has ended gets its time while the card still knows it. */
static bool settle(CUevent event)
{
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

/* Called before every launch: a card keeps the end of a launch only until SIM_RING later ones were made, and no more than SIM_IN_FLIGHT are open, so
 * that an event behind an unfinished one is still settled in time. */
void events_settle(void)
{
    pthread_mutex_lock(&pending_lock);
    for (int card = 0; card < SIM_CARDS; card++)
        while (pending[card].first && settle(pending[card].first))
            ;
    pthread_mutex_unlock(&pending_lock);
}

static CUresult event_check(CUevent event)
{
    ENTER();
    return object_is(event, OBJECT_EVENT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventDestroy_v2(CUevent event)
{
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

CUresult cuEventDestroy(CUevent event) { INJECT(); return cuEventDestroy_v2(event); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
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
    struct sim_mark mark = mark_of(stream);
    bool done = ended(stream);
    pthread_mutex_lock(&pending_lock);
    forget(event);
    event->capture = NULL;
    event->mark = mark;
    event->host = stream->host;
    event->not_before = stream_not_before(stream);
    event->planned = planned(stream);
    event->recorded = event->not_before > now ? event->not_before : now;
    event->time = measured(event->recorded);
    event->state = done ? EVENT_DONE : EVENT_PENDING;
    event->card = stream->context->card;
    if (!done) {
        event->next_pending = NULL;
        if (pending[event->card].last)
            pending[event->card].last->next_pending = event;
        else
            pending[event->card].first = event;
        pending[event->card].last = event;
    }
    pthread_mutex_unlock(&pending_lock);
    take_time(begin, driver.sim.timing.record_ns);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) { INJECT(); return cuEventRecordWithFlags(event, stream, 0); }

static bool event_done(CUevent event)
{
    pthread_mutex_lock(&pending_lock);
    bool done = settle(event);
    pthread_mutex_unlock(&pending_lock);
    return done && (event->state == EVENT_FRESH || event->time <= sim_now());
}

CUresult cuEventQuery(CUevent event)
{
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

CUresult cuEventSynchronize(CUevent event)
{
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

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    INJECT();
    CUresult result = event_check(start);
    if (!result)
        result = event_check(end);
    if (result || !milliseconds)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || start->state == EVENT_FRESH || end->state == EVENT_FRESH)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->time - start->time) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) { INJECT(); return cuEventElapsedTime_v2(milliseconds, start, end); }

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
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
        /* where kernels run side by side it waits for more than the event: for all that was launched before */
        raise_to(&stream->waits, event->mark.launch > event->mark.prefix ? event->mark.launch : event->mark.prefix);
        raise_to(&stream->not_before, event->not_before);
        raise_to(&stream->planned, event->planned);
        if (event->host > stream->host)
            stream->host = event->host;
    } else {
        uint64_t end = sim_expected_end(&driver.sim, event->context->card, event->mark);
        raise_to(&stream->not_before, end > event->not_before ? end : event->not_before);
    }
    return CUDA_SUCCESS;
}
