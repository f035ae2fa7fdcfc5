/* Green contexts: parts of a primary context with their own multiprocessors. The primary context owns everything made
 * in a green context; launches also count for the green context. Source: cuda.h, "Green Contexts". */
#include <string.h>

#include "cuda/driver.h"

#define RESOURCE_MAGIC 0x76677075u

/* The simulator's data in a resource, where cuda.h leaves room for the driver. */
struct inside {
    uint32_t magic;
    int device;
    bool split; /* the result of a split: it must become a green context before another split */
};

struct CUdevResourceDesc_st {
    struct object object;
    int device;
    unsigned multiprocessors;
};

static struct inside inside_of(const CUdevResource *resource) {
    struct inside inside;
    memcpy(&inside, resource->_internal_padding, sizeof inside);
    return inside;
}

static unsigned granularity(void) {
    return driver.sim.profile->major >= 9 ? 8 : 2;
}

/* The smallest partition, by architecture: the guidelines in cuda.h of CUDA 12.4. */
static unsigned least(void) {
    return driver.sim.profile->major >= 9 ? 8 : driver.sim.profile->major == 8 ? 4 : 2;
}

static CUdevResource resource_of(int device, unsigned multiprocessors, bool split) {
    CUdevResource resource = {.type = multiprocessors ? CU_DEV_RESOURCE_TYPE_SM : CU_DEV_RESOURCE_TYPE_INVALID};
    struct inside inside = {RESOURCE_MAGIC, device, split};
    memcpy(resource._internal_padding, &inside, sizeof inside);
    resource.sm.smCount = multiprocessors;
    resource.sm.minSmPartitionSize = least();
    resource.sm.smCoscheduledAlignment = granularity();
    return resource;
}

static CUresult give(CUdevResource *out, CUdevResourceType type, const CUdevResource *resource) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *out = *resource;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *out, CUdevResourceType type) {
    ENTER_DEVICE(device);
    CUdevResource whole = resource_of(device, (unsigned)driver.sim.profile->multiprocessors, false);
    return give(out, type, &whole);
}

CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *out, CUdevResourceType type) {
    ENTER();
    if (!object_is(context, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return context->green ? give(out, type, &context->green->resource)
                          : cuDeviceGetDevResource(context->device, out, type);
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *out, CUdevResourceType type) {
    ENTER();
    return object_is(green, OBJECT_GREEN) ? give(out, type, &green->resource) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                     CUdevResource *remainder, unsigned int flags, unsigned int count) {
    ENTER();
    if (!groups || !input || flags & ~3u || (result && !*groups))
        return CUDA_ERROR_INVALID_VALUE;
    struct inside from = inside_of(input);
    if (input->type != CU_DEV_RESOURCE_TYPE_SM || from.magic != RESOURCE_MAGIC)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    if (from.split)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    if (count > input->sm.smCount)
        return CUDA_ERROR_INVALID_VALUE;
    bool alone = flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING;
    unsigned step = alone ? 2 : granularity(), floor = alone ? 2 : least(), size = count > floor ? count : floor;
    size = (size + step - 1) / step * step;
    unsigned most = input->sm.smCount / size, made = result && *groups < most ? *groups : most;
    for (unsigned i = 0; result && i < made; i++)
        result[i] = resource_of(from.device, size, true);
    if (remainder)
        *remainder = resource_of(from.device, input->sm.smCount - made * size, true);
    *groups = made;
    return made || !result ? CUDA_SUCCESS : CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count) {
    ENTER();
    if (!out || !resources || !count)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned multiprocessors = 0;
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM || inside_of(&resources[i]).magic != RESOURCE_MAGIC)
            return CUDA_ERROR_INVALID_RESOURCE_TYPE;
        if (inside_of(&resources[i]).device != inside_of(resources).device)
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        multiprocessors += resources[i].sm.smCount;
    }
    CUdevResourceDesc descriptor = object_new(OBJECT_DESCRIPTOR); /* lives as long as the process */
    if (!descriptor)
        return CUDA_ERROR_OUT_OF_MEMORY;
    descriptor->device = inside_of(resources).device;
    descriptor->multiprocessors = multiprocessors;
    *out = descriptor;
    return CUDA_SUCCESS;
}

CUgreenCtx current_green(void) {
    struct thread_state *thread = thread_state();
    CUcontext context = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    return context && object_is(context, OBJECT_CONTEXT) ? context->green : NULL;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc descriptor, CUdevice device, unsigned int flags) {
    ENTER_DEVICE(device);
    if (!out || flags & ~(unsigned)CU_GREEN_CTX_DEFAULT_STREAM || !object_is(descriptor, OBJECT_DESCRIPTOR) ||
        descriptor->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext base;
    CUresult result = cuDevicePrimaryCtxRetain(&base, device);
    if (result)
        return result;
    CUgreenCtx green = object_new(OBJECT_UNFINISHED);
    CUcontext handle = green ? object_new(OBJECT_UNFINISHED) : NULL;
    CUstream legacy = handle ? stream_new(base, CU_STREAM_NON_BLOCKING, 0) : NULL;
    if (!legacy) {
        if (handle)
            object_free(handle);
        if (green)
            object_free(green);
        cuDevicePrimaryCtxRelease_v2(device);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    legacy->green = green;
    *handle = (struct CUctx_st){.object = handle->object,
                                .device = base->device,
                                .card = base->card,
                                .flags = base->flags,
                                .api_version = base->api_version,
                                .id = driver_id(),
                                .legacy = legacy,
                                .green = green,
                                .base = base};
    green->handle = handle;
    green->resource = resource_of(device, descriptor->multiprocessors, false);
    green->id = handle->id;
    green->legacy = legacy;
    object_made(handle, OBJECT_CONTEXT);
    object_made(green, OBJECT_GREEN);
    *out = green;
    return CUDA_SUCCESS;
}

static void detach(void *handle, void *green) {
    CUstream stream = handle;
    if (stream->green != green)
        return;
    capture_break(stream);
    stream->detached = true;
    stream->green = NULL;
}

static void drop(CUgreenCtx green) {
    object_each(OBJECT_STREAM, detach, green);
    object_free(green->legacy);
    object_free(green->handle);
    object_free(green);
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    ENTER();
    if (!object_is(green, OBJECT_GREEN))
        return CUDA_ERROR_INVALID_CONTEXT;
    int device = green->handle->device;
    drop(green);
    return cuDevicePrimaryCtxRelease_v2(device);
}

static void drop_of(void *green, void *context) {
    if (((CUgreenCtx)green)->handle->base == context)
        drop(green);
}

void greens_of_context_drop(CUcontext context) {
    object_each(OBJECT_GREEN, drop_of, context);
}

void context_wait(CUcontext context) {
    CUcontext base = context->green ? context->base : context;
    sim_wait(&driver.sim, context->card, context->green ? context->green->last : base->last);
    if (!context->green) {
        host_wait(base->host);
        copies_wait(base);
    }
}

CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx green) {
    ENTER();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(green, OBJECT_GREEN))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = green->handle;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx green, unsigned int flags, int priority) {
    ENTER();
    if (!object_is(green, OBJECT_GREEN))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!out || flags != CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = stream_new(green->handle->base, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->green = green;
    *out = stream;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetId(CUgreenCtx green, unsigned long long *id) {
    ENTER();
    green = green ? green : current_green();
    if (!id || !object_is(green, OBJECT_GREEN))
        return !id ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    *id = green->id;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *out) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !out)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *out = stream->green;
    return CUDA_SUCCESS;
}

struct captures {
    CUcontext base;
    CUgreenCtx green; /* NULL: all streams of the context */
    bool found;
};

static void break_capture(void *handle, void *argument) {
    CUstream stream = handle;
    struct captures *captures = argument;
    if (!stream->capture || stream->context != captures->base || (captures->green && stream->green != captures->green))
        return;
    capture_break(stream);
    captures->found = true;
}

/* Checks a record or a wait of an event for a context, or for a green context by its handle. */
static CUresult check(CUcontext context, CUevent event, bool record) {
    struct captures captures = {.base = context->green ? context->base : context, .green = context->green};
    if (!object_is(event, OBJECT_EVENT) || (record && event->context != captures.base))
        return CUDA_ERROR_INVALID_HANDLE;
    object_each(OBJECT_STREAM, break_capture, &captures);
    return captures.found || (!record && event->capture) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static CUresult record(CUcontext context, CUevent event) {
    CUresult result = check(context, event, true);
    if (!result)
        event_record_all(event, context->green ? context->base : context,
                         context->green ? context->green->last : context->last);
    return result;
}

static CUresult wait(CUcontext context, CUevent event) {
    CUresult result = check(context, event, false);
    CUgreenCtx green = context->green;
    if (!result)
        event_wait_by(event, context->card, green ? &green->waits : &context->waits,
                      green ? &green->waits_until : &context->waits_until);
    return result;
}

CUresult cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event) {
    ENTER();
    return object_is(green, OBJECT_GREEN) ? record(green->handle, event) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event) {
    ENTER();
    return object_is(green, OBJECT_GREEN) ? wait(green->handle, event) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxRecordEvent(CUcontext context, CUevent event) {
    ENTER();
    return object_is(context, OBJECT_CONTEXT) ? record(context, event) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxWaitEvent(CUcontext context, CUevent event) {
    ENTER();
    return object_is(context, OBJECT_CONTEXT) ? wait(context, event) : CUDA_ERROR_INVALID_CONTEXT;
}
