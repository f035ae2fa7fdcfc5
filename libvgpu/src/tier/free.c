/* Ends blocks of the tier: freed at once, freed in stream order, or with their context. */
#define _GNU_SOURCE
#include <pthread.h>

#include "base/clock.h"
#include "base/log.h"
#include "ledger/charge.h"
#include "reserves/capture.h"
#include "tier/tier.h"

#define AGAIN_NS 50000u /* time between two checks whether threads have left a context, or blocks have ended */
#define PATIENCE_NS UINT64_C(10000000000) /* how long to wait for blocks that do not end: some kernels take seconds */

/* Weak: before glibc 2.34 this function is in libpthread, and this library must not load libpthread into programs
 * without threads. */
#pragma weak pthread_setcancelstate

/* The list of leaving blocks: freed in stream order, or while a capture was open. Linked by `next`, protected by the
 * lock. */
static uint32_t leaving = VGPU_TIER_NONE; /* the block freed last */
static atomic_uint leaving_count;
static _Atomic uint64_t freed_count, ended_count; /* blocks that have entered this list, and that have left it */

void vgpu_tier_free_forget(void) {
    leaving = VGPU_TIER_NONE;
    atomic_store(&leaving_count, 0);
}

bool vgpu_tier_enter_context(CUcontext context, bool *pushed) {
    CUcontext now = NULL;
    *pushed = false;
    if (DRIVER(cuCtxGetCurrent) && DRIVER(cuCtxGetCurrent)(&now) == CUDA_SUCCESS && now == context)
        return true;
    *pushed = DRIVER(cuCtxPushCurrent_v2) && DRIVER(cuCtxPopCurrent_v2) &&
              DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
    return *pushed;
}

void vgpu_tier_leave_context(bool pushed) {
    CUcontext popped;
    if (pushed)
        DRIVER(cuCtxPopCurrent_v2)(&popped);
}

/* With the lock held. Returns the charges, and the memory to the driver, unless the context took the memory along.
 * Memory that the driver does not unmap stays there: neither its addresses nor its bytes are free. */
static void end(uint32_t number, bool context_gone) {
    const struct vgpu_tier_record record = *vgpu_tier_record(number);
    CUresult result = CUDA_SUCCESS;
    const CUstreamCaptureMode mode = vgpu_relax();
    if (record.event && !record.going && DRIVER(cuEventDestroy_v2))
        DRIVER(cuEventDestroy_v2)(record.event);
    if (!record.pinned) {
        result = DRIVER(cuMemUnmap)(record.base, record.bytes);
        DRIVER(cuMemRelease)(record.handle);
    } else if (!context_gone) {
        bool pushed;
        if (vgpu_tier_enter_context(record.context, &pushed))
            DRIVER(cuMemFreeHost)(record.memory);
        vgpu_tier_leave_context(pushed);
    }
    vgpu_restore(mode);
    vgpu_tier_leave(number);
    if (result != CUDA_SUCCESS) {
        vgpu_log(VGPU_LOG_ALERT, "%llu bytes at 0x%llx are lost: the driver does not unmap them (%d)",
                 (unsigned long long)record.bytes, (unsigned long long)record.base, (int)result);
        return;
    }
    if (!record.pinned)
        vgpu_tier_unreserve(record.base, record.bytes);
    vgpu_uncharge(record.where, record.bytes);
    vgpu_uncharge(record.allocated, record.asked);
}

/* With the lock held. From now on a second free does not find the block. */
static void put_off(uint32_t number, CUevent event, CUcontext event_context) {
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    record->leaving = true;
    record->event = event;
    record->event_context = event_context;
    record->freed = atomic_fetch_add(&freed_count, 1);
    record->next = leaving;
    leaving = number;
    vgpu_tier_disregard(number);
    atomic_fetch_add(&leaving_count, 1);
}

/* With the lock held. The block that begins at an address and is to be freed. VGPU_TIER_NONE: no such block, or *answer
 * holds the error. */
static uint32_t begins_at(CUdeviceptr pointer, CUresult *answer) {
    const uint32_t number = vgpu_tier_around(pointer);
    *answer = CUDA_SUCCESS;
    if (number == VGPU_TIER_NONE)
        return number;
    const struct vgpu_tier_record *record = vgpu_tier_record(number);
    if (record->base == pointer && !record->leaving)
        return number;
    *answer = CUDA_ERROR_INVALID_VALUE;
    return VGPU_TIER_NONE;
}

static CUresult synchronize(CUcontext context) {
    bool pushed;
    if (!DRIVER(cuCtxSynchronize) || !vgpu_tier_enter_context(context, &pushed))
        return CUDA_ERROR_INVALID_CONTEXT;
    const CUstreamCaptureMode mode = vgpu_relax();
    const CUresult result = DRIVER(cuCtxSynchronize)();
    vgpu_restore(mode);
    vgpu_tier_leave_context(pushed);
    return result;
}

/* Whether the block's event has passed. An error, for example because a capture has begun, does not mean that it
 * has. */
static bool passed(const struct vgpu_tier_record *record) {
    bool pushed;
    if (!record->event || record->going || !DRIVER(cuEventQuery) ||
        !vgpu_tier_enter_context(record->event_context, &pushed))
        return false;
    const CUresult result = DRIVER(cuEventQuery)(record->event);
    vgpu_tier_leave_context(pushed);
    return result == CUDA_SUCCESS;
}

static __attribute__((noinline)) bool collect(void) {
    bool any = false;
    if (vgpu_any_capture() || !vgpu_tier_try())
        return false;
    const CUstreamCaptureMode mode = vgpu_relax();
    for (uint32_t *at = &leaving; *at != VGPU_TIER_NONE;) {
        const uint32_t number = *at;
        struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (!passed(record)) {
            at = &record->next;
            continue;
        }
        *at = record->next;
        atomic_fetch_sub(&leaving_count, 1);
        end(number, false);
        atomic_fetch_add(&ended_count, 1);
        any = true;
    }
    vgpu_restore(mode);
    vgpu_tier_unlock();
    return any;
}

bool vgpu_tier_collect(void) {
    return __builtin_expect(atomic_load_explicit(&leaving_count, memory_order_relaxed) != 0, 0) && collect();
}

/* With the lock held. A block freed while a capture was open, with this buffer number (0: any); VGPU_TIER_NONE:
 * none. */
static uint32_t without_event(uint64_t buffer) {
    uint32_t number = leaving;
    while (number != VGPU_TIER_NONE) {
        const struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (!record->event && (buffer ? record->buffer_id == buffer : !record->going))
            break;
        number = record->next;
    }
    return number;
}

static void forget_leaving(uint32_t number);

/* Ends a block without an event, when its context has finished all work. A thread that wants to destroy the context
 * waits for that. False: there is no such block, or the driver does not wait. */
static bool finish_one(void) {
    vgpu_tier_lock();
    uint32_t number = without_event(0);
    if (number == VGPU_TIER_NONE) {
        vgpu_tier_unlock();
        return false;
    }
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    const CUcontext context = record->context;
    const uint64_t buffer = record->buffer_id;
    record->awaited++;
    vgpu_tier_unlock();
    const bool finished = synchronize(context) == CUDA_SUCCESS;
    vgpu_tier_lock();
    number = without_event(buffer);
    if (number != VGPU_TIER_NONE && --vgpu_tier_record(number)->awaited == 0 && finished) {
        forget_leaving(number);
        end(number, false);
        atomic_fetch_add(&ended_count, 1);
    }
    vgpu_tier_unlock();
    return finished;
}

void vgpu_tier_finish(void) {
    if (!atomic_load_explicit(&leaving_count, memory_order_relaxed))
        return;
    int before, disabled;
    /* a cancelled thread would leave its context marked as awaited, so that the context could never be destroyed */
    if (pthread_setcancelstate)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    while (!vgpu_any_capture() && finish_one())
        ;
    vgpu_tier_collect();
    if (pthread_setcancelstate)
        pthread_setcancelstate(before, &disabled);
}

struct vgpu_tier_patience vgpu_tier_patience(void) {
    return (struct vgpu_tier_patience){.ended = atomic_load(&ended_count)};
}

/* Whether one of the first `count` freed blocks is still leaving. */
static bool leaves_of_first(uint64_t count) {
    bool any = false;
    vgpu_tier_lock();
    for (uint32_t number = leaving; number != VGPU_TIER_NONE && !any; number = vgpu_tier_record(number)->next)
        any = vgpu_tier_record(number)->freed < count;
    vgpu_tier_unlock();
    return any;
}

bool vgpu_tier_await(struct vgpu_tier_patience *patience) {
    if (patience->over)
        return false;
    if (!patience->freed)
        patience->freed = atomic_load(&freed_count);
    patience->until_ns = vgpu_now_ns() + PATIENCE_NS;
    while (true) {
        patience->over = !leaves_of_first(patience->freed) || vgpu_any_capture() || vgpu_now_ns() >= patience->until_ns;
        const uint64_t ended = atomic_load(&ended_count);
        if (ended != patience->ended) {
            patience->ended = ended;
            return true;
        }
        if (patience->over)
            return false;
        vgpu_sleep_until(vgpu_now_ns() + AGAIN_NS);
        vgpu_tier_finish();
    }
}

/* Whether the stream may reuse the block's memory; no other stream may. */
static bool may_follow(const struct vgpu_tier_record *record, uint64_t stream_id, uint64_t bytes, CUcontext context) {
    return record->event && record->stream_id == stream_id && record->asked == bytes && record->context == context &&
           !record->shared && !record->going;
}

bool vgpu_tier_take_back(CUdeviceptr *pointer, uint64_t bytes, CUstream stream, const struct vgpu_place *place) {
    unsigned long long id = 0;
    CUevent event = NULL;
    if (!atomic_load_explicit(&leaving_count, memory_order_relaxed) || !DRIVER(cuStreamGetId) ||
        DRIVER(cuStreamGetId)(stream, &id) != CUDA_SUCCESS || !id)
        return false;
    vgpu_tier_lock();
    uint32_t number = leaving;
    while (number != VGPU_TIER_NONE && !may_follow(vgpu_tier_record(number), id, bytes, place->context))
        number = vgpu_tier_record(number)->next;
    if (number != VGPU_TIER_NONE) {
        struct vgpu_tier_record *record = vgpu_tier_record(number);
        forget_leaving(number);
        event = record->event;
        record->event = NULL;
        record->event_context = NULL;
        record->leaving = false;
        vgpu_tier_begin_again(number);
        *pointer = record->base;
    }
    vgpu_tier_unlock();
    if (event)
        DRIVER(cuEventDestroy_v2)(event);
    return event;
}

/* Hides a block that is freed at once from the program. False: no block of the tier begins there, or *answer holds the
 * error. */
static bool find_to_free(CUdeviceptr pointer, CUcontext *context, uint64_t *buffer, CUresult *answer) {
    vgpu_tier_lock();
    const uint32_t number = begins_at(pointer, answer);
    const bool found = number != VGPU_TIER_NONE;
    if (found) {
        *context = vgpu_tier_record(number)->context;
        *buffer = vgpu_tier_record(number)->buffer_id;
    }
    vgpu_tier_unlock();
    return found;
}

/* Like cuMemFree, this waits for the context's work on the block. */
bool vgpu_tier_free(CUdeviceptr pointer, CUresult *result) {
    CUcontext context;
    uint64_t buffer;
    if (!find_to_free(pointer, &context, &buffer, result))
        return *result != CUDA_SUCCESS;
    bool capturing = vgpu_any_capture(); /* in any thread: a wait for the whole context would break the capture */
    *result = capturing ? CUDA_SUCCESS : synchronize(context);
    if (*result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) { /* a capture began in between */
        capturing = true;
        *result = CUDA_SUCCESS;
    }
    if (*result != CUDA_SUCCESS)
        return true;
    vgpu_tier_lock();
    CUresult answer;
    const uint32_t number = begins_at(pointer, &answer);
    if (number == VGPU_TIER_NONE || vgpu_tier_record(number)->buffer_id != buffer)
        *result = CUDA_ERROR_INVALID_VALUE; /* another free of this block was faster */
    else if (capturing)
        put_off(number, NULL, NULL);
    else
        end(number, false);
    vgpu_tier_unlock();
    vgpu_tier_finish();
    return true;
}

bool vgpu_tier_free_in_order(CUdeviceptr pointer, CUstream stream, CUresult *result) {
    struct vgpu_place place;
    CUcontext context;
    uint64_t buffer;
    if (!find_to_free(pointer, &context, &buffer, result))
        return *result != CUDA_SUCCESS;
    CUevent event = NULL;
    unsigned long long id = 0;
    bool pushed;
    *result = CUDA_ERROR_INVALID_CONTEXT;
    if (!DRIVER(cuEventCreate) || !DRIVER(cuEventRecord) || !DRIVER(cuEventDestroy_v2) ||
        !vgpu_place_of_stream(stream, &place) || !vgpu_tier_enter_context(place.context, &pushed))
        return true;
    const CUstreamCaptureMode mode = vgpu_relax();
    *result = DRIVER(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING);
    if (*result == CUDA_SUCCESS)
        *result = DRIVER(cuEventRecord)(event, stream);
    if (!DRIVER(cuStreamGetId) || DRIVER(cuStreamGetId)(stream, &id) != CUDA_SUCCESS)
        id = 0;
    vgpu_restore(mode);
    vgpu_tier_leave_context(pushed);
    CUresult answer;
    vgpu_tier_lock();
    const uint32_t number = begins_at(pointer, &answer);
    if (*result == CUDA_SUCCESS && (number == VGPU_TIER_NONE || vgpu_tier_record(number)->buffer_id != buffer))
        *result = CUDA_ERROR_INVALID_VALUE;
    if (*result == CUDA_SUCCESS) {
        put_off(number, event, place.context);
        vgpu_tier_record(number)->stream_id = id;
    } else if (event)
        DRIVER(cuEventDestroy_v2)(event);
    vgpu_tier_unlock();
    return true;
}

/* Under the lock. */
static void forget_leaving(uint32_t number) {
    for (uint32_t *at = &leaving; *at != VGPU_TIER_NONE; at = &vgpu_tier_record(*at)->next) {
        if (*at != number)
            continue;
        *at = vgpu_tier_record(number)->next;
        atomic_fetch_sub(&leaving_count, 1);
        return;
    }
}

static bool concerns(const struct vgpu_tier_record *record, CUcontext context) {
    return record->context == context || (record->leaving && record->event_context == context);
}

/* Under the lock. */
static bool awaited(CUcontext context) {
    for (uint32_t number = leaving; number != VGPU_TIER_NONE; number = vgpu_tier_record(number)->next)
        if (vgpu_tier_record(number)->awaited && vgpu_tier_record(number)->context == context)
            return true;
    return false;
}

void vgpu_tier_context_going(CUcontext context) {
    if (!context || !vgpu_tier_any())
        return;
    vgpu_tier_lock(); /* a thread that is in the context holds this lock */
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE; number = vgpu_tier_next(number + 1))
        vgpu_tier_record(number)->going += concerns(vgpu_tier_record(number), context);
    while (awaited(context)) {
        vgpu_tier_unlock();
        vgpu_sleep_until(vgpu_now_ns() + AGAIN_NS);
        vgpu_tier_lock();
    }
    vgpu_tier_unlock();
}

void vgpu_tier_context_went(CUcontext context, bool gone, uint64_t moment) {
    if (!context || !vgpu_tier_any())
        return;
    vgpu_tier_lock();
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE; number = vgpu_tier_next(number + 1)) {
        struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (!concerns(record, context))
            continue;
        const bool its = record->context == context && record->buffer_id < moment;
        /* not marked by a new context with the same handle */
        const bool marked = record->going && record->leaving && record->event_context == context;
        record->going -= record->going != 0;
        if (!gone)
            continue;
        if (marked)
            record->event = NULL; /* the event is destroyed, and the work before it has finished */
        if (!its && (!marked || record->going))
            continue;
        if (record->leaving)
            forget_leaving(number);
        end(number, its);
        atomic_fetch_add(&ended_count, 1);
    }
    vgpu_tier_unlock();
}

bool vgpu_tier_green_going(CUcontext context) {
    bool any = false;
    if (!vgpu_tier_any())
        return true;
    vgpu_tier_context_going(context);
    vgpu_tier_lock();
    for (uint32_t number = leaving; number != VGPU_TIER_NONE && !any; number = vgpu_tier_record(number)->next)
        any = vgpu_tier_record(number)->event_context == context;
    vgpu_tier_unlock();
    return !any || synchronize(context) == CUDA_SUCCESS;
}

void vgpu_tier_green_went(CUcontext context, bool gone, CUcontext heir, bool finished, uint64_t moment) {
    if (!vgpu_tier_any())
        return;
    vgpu_tier_lock();
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE; number = vgpu_tier_next(number + 1)) {
        struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (!concerns(record, context))
            continue;
        const bool marked = record->going != 0;
        record->going -= marked;
        if (!gone)
            continue;
        if (record->context == context && record->buffer_id < moment)
            record->context = heir;
        if (!marked || !record->leaving || record->event_context != context)
            continue;
        record->event = NULL; /* its stream cannot be asked any more */
        record->event_context = NULL;
        if (!finished)
            continue;
        forget_leaving(number);
        end(number, false);
        atomic_fetch_add(&ended_count, 1);
    }
    vgpu_tier_unlock();
}
