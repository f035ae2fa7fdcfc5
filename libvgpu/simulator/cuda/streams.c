/* Streams. A stream consists of two sequences: its last launch, and the launch up to which it waits for all
 * launches. */
#include <string.h>

#include "cuda/driver.h"

CUstream stream_new(CUcontext context, unsigned flags, int priority) {
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

CUresult stream_resolve(CUstream handle, CUstream *out) {
    ENTER_CONTEXT(context);
    if (!handle && thread_state()->own_default_stream)
        handle = CU_STREAM_PER_THREAD;
    if (!handle || handle == CU_STREAM_LEGACY) {
        CUgreenCtx green = current_green();
        *out = green ? green->legacy : context->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        if (current_green())
            return CUDA_ERROR_INVALID_HANDLE; /* cuda.h on cuStreamGetCtx */
        *out = stream_per_thread(context);
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = handle;
    return !object_is(handle, OBJECT_STREAM) ? CUDA_ERROR_INVALID_HANDLE
           : handle->detached                ? CUDA_ERROR_STREAM_DETACHED
                                             : CUDA_SUCCESS;
}

struct sim_mark stream_mark(CUstream stream) {
    uint64_t blocking = stream == stream->context->legacy ? stream->context->last_blocking : 0;
    uint64_t others[] = {stream->waits, stream->context->waits, stream->green ? stream->green->waits : 0};
    for (unsigned i = 0; i < 3; i++)
        blocking = others[i] > blocking ? others[i] : blocking;
    return (struct sim_mark){stream->last, blocking};
}

uint64_t stream_last(CUstream stream) {
    struct sim_mark mark = stream_mark(stream);
    return mark.launch > mark.prefix ? mark.launch : mark.prefix;
}

/* As with earlier launches: the legacy stream waits for all blocking streams, and they wait for the legacy stream. */
static uint64_t at_least(CUstream stream, uint64_t own, const _Atomic uint64_t *blocking,
                         const _Atomic uint64_t *legacy) {
    uint64_t other = stream == stream->context->legacy        ? *blocking
                     : stream->flags & CU_STREAM_NON_BLOCKING ? 0
                                                              : *legacy;
    return own > other ? own : other;
}

uint64_t stream_not_before(CUstream stream) {
    uint64_t own = stream->not_before,
             others[] = {stream->context->waits_until, stream->green ? stream->green->waits_until : 0};
    for (unsigned i = 0; i < 2; i++)
        own = others[i] > own ? others[i] : own;
    return at_least(stream, own, &stream->context->copied_blocking, &stream->context->legacy->not_before);
}

uint64_t stream_planned(CUstream stream) {
    return at_least(stream, stream->planned, &stream->context->planned_blocking, &stream->context->legacy->planned);
}

/* A copy begins when the work before it has probably ended. That depends on the card's prediction, and on copies for
 * which this work waits, which the card does not know. */
uint64_t stream_engine(CUstream stream, enum sim_engine_kind engine, uint64_t duration) {
    CUcontext context = stream->context;
    host_wait(stream->host);
    uint64_t begin = sim_now() + driver.sim.timing.launch_ns;
    uint64_t others[] = {stream_not_before(stream), stream_planned(stream),
                         sim_expected_end(&driver.sim, context->card, stream_mark(stream))};
    for (unsigned i = 0; i < 3; i++)
        begin = others[i] > begin ? others[i] : begin;
    uint64_t end = sim_engine(&driver.sim, context->card, engine, begin, duration);
    raise_to(&stream->not_before, end);
    raise_to(&context->copied, end);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        raise_to(&context->copied_blocking, end);
    return end;
}

void stream_follow(CUstream stream, CUstream other) {
    uint64_t ends[] = {sim_expected_end(&driver.sim, other->context->card, stream_mark(other)),
                       stream_not_before(other), stream_planned(other)};
    for (unsigned i = 0; i < 3; i++)
        raise_to(&stream->not_before, ends[i]);
}

void copies_wait(CUcontext context) {
    for (uint64_t now = sim_now(); context->copied > now; now = sim_now())
        sim_sleep_until(context->copied);
}

/* Computes when a kernel ends if its process has the card alone. */
static void plan(CUstream stream, uint64_t duration) {
    static _Atomic uint64_t lanes[SIM_CARDS]; /* used if kernels run one by one */
    _Atomic uint64_t *lane = &lanes[stream->context->card];
    uint64_t begin = sim_now() + driver.sim.timing.launch_ns, not_before = stream_not_before(stream),
             before = stream_planned(stream);
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

/* The share of the card that a kernel's blocks fill if they all run at once; at most the share of its green context. */
static uint32_t width_of(const struct launch_shape *shape, uint64_t blocks, CUgreenCtx green) {
    const struct sim_profile *profile = driver.sim.profile;
    uint64_t threads = (uint64_t)shape->block[0] * shape->block[1] * shape->block[2];
    uint64_t resident = (uint64_t)profile->threads_per_multiprocessor / (threads ? threads : 1);
    resident =
        (resident < (uint64_t)profile->blocks_per_multiprocessor ? resident
                                                                 : (uint64_t)profile->blocks_per_multiprocessor) *
        (uint64_t)profile->multiprocessors;
    uint64_t share =
        green ? (uint64_t)green->resource.sm.smCount * SIM_WHOLE / (uint64_t)profile->multiprocessors : SIM_WHOLE;
    uint64_t width = blocks < resident ? blocks * SIM_WHOLE / resident : SIM_WHOLE;
    return (uint32_t)(width < share ? width : share);
}

/* The mark after which a launch or an event of a stream runs. */
static struct sim_mark behind(CUstream stream) {
    struct sim_mark after = stream_mark(stream);
    CUcontext context = stream->context;
    if (!(stream->flags & CU_STREAM_NON_BLOCKING) && stream != context->legacy && context->legacy->last > after.prefix)
        after.prefix = context->legacy->last;
    return after;
}

uint64_t stream_occupy(CUstream stream, uint64_t duration, uint32_t width, uint32_t group) {
    CUcontext context = stream->context;
    if (driver.sim.timing.copies)
        plan(stream, duration);
    uint64_t sequence =
        sim_launch(&driver.sim, context->card, duration, width, stream_not_before(stream), behind(stream), group);
    if (sequence) {
        raise_to(&stream->last, sequence);
        raise_to(&context->last, sequence);
        if (stream->green)
            raise_to(&stream->green->last, sequence);
        if (!(stream->flags & CU_STREAM_NON_BLOCKING))
            raise_to(&context->last_blocking, sequence);
    }
    return sequence;
}

CUresult stream_launch(CUstream stream, const struct launch_shape *shape) {
    uint64_t blocks = (uint64_t)shape->grid[0] * shape->grid[1] * shape->grid[2];
    uint64_t duration = duration_next(&shape->function->duration, blocks, shape->argument);
    CUcontext context = stream->context;
    events_settle_some(context->card);
    host_wait(stream->host); /* the card cannot wait for a host function, so the caller waits */
    if (touch_matters(shape->function))
        duration += touch_launch(context, shape);
    uint32_t width = driver.sim.timing.kernels > 1 ? width_of(shape, blocks, stream->green) : SIM_WHOLE;
    const struct duration *kind = &shape->function->duration;
    uint32_t group =
        kind->meets && driver.sim.timing.kernels <= 1 ? sim_group(&driver.sim, kind->name, kind->meets) : 0;
    uint64_t sequence = stream_occupy(stream, duration, width ? width : 1, group);
    if (!sequence)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (shape->pointers)
        touch_note(context, shape, sequence);
    return CUDA_SUCCESS;
}

bool stream_ended(CUstream stream) {
    return sim_reached(&driver.sim, stream->context->card, stream_mark(stream)) && host_done(stream->host) &&
           (!stream_not_before(stream) || stream_not_before(stream) <= sim_now());
}

CUresult stream_wait(CUstream stream) {
    CUresult result = capture_forbids(stream);
    if (result)
        return result;
    sim_wait_mark(&driver.sim, stream->context->card, stream_mark(stream));
    host_wait(stream->host);
    for (uint64_t now = sim_now(), until = stream_not_before(stream); until > now; now = sim_now())
        sim_sleep_until(until);
    sim_seen(&driver.sim); /* the stream may have waited for work of another card */
    return CUDA_SUCCESS;
}

static CUresult create(CUstream *out, unsigned flags, int priority) {
    ENTER_CONTEXT(context);
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = stream_new(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->green = current_green();
    *out = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
    INJECT();
    return create(out, flags, 0);
}
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
    INJECT();
    return create(out, flags, priority);
}

/* Pending work continues: like the real driver, this only releases the handle. */
CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER();
    if (!object_is(stream, OBJECT_STREAM) || stream == stream->context->legacy ||
        (!stream->detached && stream->green && stream == stream->green->legacy))
        return CUDA_ERROR_INVALID_HANDLE;
    capture_abandon(stream);
    object_free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
    INJECT();
    return cuStreamDestroy_v2(stream);
}

CUresult cuStreamQuery(CUstream handle) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result)
        result = capture_forbids(stream);
    if (result)
        return result;
    bool done = stream_ended(stream);
    if (done)
        events_settle();
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
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
