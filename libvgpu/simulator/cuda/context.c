/* Contexts: primary contexts, created contexts, and each thread's stack of contexts. */
#include <string.h>

#include "cuda/driver.h"

#define STACK (int)(sizeof((struct thread_state *)0)->stack / sizeof(CUcontext))

/* serialises creation and destruction, which take other locks */
static pthread_mutex_t contexts = PTHREAD_MUTEX_INITIALIZER;

/* With `contexts` held. */
static CUcontext primary_handle(int device) {
    if (!driver.primary_handle[device])
        driver.primary_handle[device] = object_new(OBJECT_PRIMARY_WAITING);
    return driver.primary_handle[device];
}

CUcontext context_primary(int device) {
    pthread_mutex_lock(&contexts);
    CUcontext handle = primary_handle(device);
    pthread_mutex_unlock(&contexts);
    return handle;
}

/* True also for a primary context that is not active. Other calls then return CUDA_ERROR_CONTEXT_IS_DESTROYED (cuda.h:
 * "or is a primary context which has not yet been initialized"). */
static bool may_be_current(CUcontext context) {
    return object_is(context, OBJECT_CONTEXT) || object_is(context, OBJECT_PRIMARY_WAITING);
}

CUresult context_make(int device, unsigned flags, bool primary, unsigned api_version, CUcontext *out) {
    int card = driver.visible[device];
    if (!driver_register())
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = charge(card, driver.sim.profile->context_bytes);
    if (result)
        return result;
    CUcontext context = primary ? primary_handle(device) : object_new(OBJECT_UNFINISHED);
    if (!context) {
        uncharge(card, driver.sim.profile->context_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (primary) /* nothing of its last life may remain */
        memset((char *)context + sizeof context->object, 0, sizeof *context - sizeof context->object);
    context->device = device;
    context->card = card;
    context->flags = flags;
    context->primary = primary;
    context->api_version = api_version;
    context->id = driver_id();
    context->limits[CU_LIMIT_STACK_SIZE] = 1024;
    context->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 7 * MIB;
    context->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 * MIB;
    context->limits[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
    context->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    context->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    context->legacy = stream_new(context, CU_STREAM_DEFAULT, 0);
    atomic_fetch_add(&driver.sim.self->cards[card].contexts, 1);
    object_made(context, OBJECT_CONTEXT);
    libraries_of_context_load(context);
    *out = context;
    return CUDA_SUCCESS;
}

static bool block_of(const struct block *block, void *context) {
    return block->context == context && block->kind != BLOCK_POOL;
}

static void block_gone(const struct block *block, void *context) {
    if (block->kind == BLOCK_EXTERNAL)
        external_release(block);
    if (block->shared)
        ipc_forget(block);
    if (block->kind == BLOCK_GRAPH && !block->absent)
        graph_memory_release(block);
    else if (block->kind < BLOCK_GRAPH)
        uncharge(((CUcontext)context)->card, block->size);
}

static void object_of(void *handle, void *context) {
    struct object *object = handle;
    switch (object->type) {
    case OBJECT_STREAM:
        if (((CUstream)handle)->context == context) {
            capture_abandon(handle);
            object_free(handle);
        }
        break;
    case OBJECT_EVENT:
        if (((CUevent)handle)->context == context)
            ((CUevent)handle)->context = NULL; /* cuEventDestroy stays allowed */
        break;
    case OBJECT_MODULE:
        if (((CUmodule)handle)->context == context)
            module_unload(handle);
        break;
    case OBJECT_ARRAY:
        if (((CUarray)handle)->context == context && !((CUarray)handle)->level)
            cuArrayDestroy(handle);
        break;
    case OBJECT_MIPMAP:
        if (((CUmipmappedArray)handle)->context == context)
            cuMipmappedArrayDestroy(handle);
        break;
    default: break;
    }
}

static void destroy(CUcontext context) {
    storage_forget(context);
    greens_of_context_drop(context);
    sim_wait(&driver.sim, context->card, context->last);
    host_wait(context->host);
    copies_wait(context);
    events_settle();
    static const enum object_type owned[] = {OBJECT_STREAM, OBJECT_MODULE, OBJECT_ARRAY, OBJECT_MIPMAP, OBJECT_EVENT};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        object_each(owned[i], object_of, context);
    imports_of_context_drop(context);
    external_of_context_drop(context);
    block_each(block_of, block_gone, context);
    graph_memory_trim(context->card);
    ranges_of_context_drop(context);
    atomic_fetch_sub(&driver.sim.self->cards[context->card].contexts, 1);
    uncharge(context->card, driver.sim.profile->context_bytes);
    context->dead = true;
    if (context->primary)
        object_made(context, OBJECT_PRIMARY_WAITING);
    else
        object_free(context);
}

/* With `contexts` held. Destroys an existing context. Releases `contexts` while libraries end what they keep for the
 * context, because they may call the driver. If another thread retains the context meanwhile, it stays, unless
 * `in_any_case`. */
static void end(CUcontext context, bool in_any_case) {
    const uint64_t life = context->id;
    const int device = context->device;
    pthread_mutex_unlock(&contexts);
    storage_end(context);
    pthread_mutex_lock(&contexts);
    if (!object_is(context, OBJECT_CONTEXT) || context->id != life || (context->references && !in_any_case))
        return;
    destroy(context);
    if (driver.primary[device] == context)
        driver.primary[device] = NULL;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    ENTER_DEVICE(device);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&contexts);
    if (!driver.primary[device])
        result = context_make(device, driver.primary_flags[device], true, 3020, &driver.primary[device]);
    if (!result) {
        driver.primary[device]->references++;
        *out = driver.primary[device];
    }
    pthread_mutex_unlock(&contexts);
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER_DEVICE(device);
    CUresult result = CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&contexts);
    CUcontext context = driver.primary[device];
    if (context && context->references) {
        if (!--context->references)
            end(context, false);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&contexts);
    return result;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    ENTER_DEVICE(device);
    pthread_mutex_lock(&contexts);
    if (driver.primary[device])
        end(driver.primary[device], true);
    pthread_mutex_unlock(&contexts);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    ENTER_DEVICE(device);
    if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    driver.primary_flags[device] = flags;
    if (driver.primary[device])
        driver.primary[device]->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER_DEVICE(device);
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = driver.primary_flags[device];
    *active = driver.primary[device] != NULL;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    INJECT();
    return cuDevicePrimaryCtxRelease_v2(device);
}
CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    INJECT();
    return cuDevicePrimaryCtxReset_v2(device);
}
CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
    INJECT();
    return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

static CUresult push(CUcontext context) {
    struct thread_state *thread = thread_state();
    if (thread->depth == STACK)
        return CUDA_ERROR_INVALID_VALUE;
    thread->stack[thread->depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *out, unsigned flags, CUdevice device, unsigned api_version) {
    ENTER_DEVICE(device);
    if (!out || flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&contexts);
    CUresult result = context_make(device, flags, false, api_version, out);
    pthread_mutex_unlock(&contexts);
    return result ? result : push(*out);
}

CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) {
    INJECT();
    return create(out, flags, device, 3010);
}
CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) {
    INJECT();
    return create(out, flags, device, 3020);
}

CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device) {
    ENTER();
    if (count < 0 || (count && !affinity))
        return CUDA_ERROR_INVALID_VALUE;
    return count ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : create(out, flags, device, 3020);
}

CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    ENTER();
    if (params && params->numExecAffinityParams)
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    return params && params->cigParams ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device, 3020);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    ENTER();
    struct thread_state *thread = thread_state();
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&contexts);
    bool known = object_is(context, OBJECT_CONTEXT) && !context->primary && !context->green;
    if (known)
        end(context, false);
    pthread_mutex_unlock(&contexts);
    if (known && thread->depth && thread->stack[thread->depth - 1] == context)
        thread->depth--;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxDestroy(CUcontext context) {
    INJECT();
    return cuCtxDestroy_v2(context);
}

CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
    ENTER_CONTEXT(context);
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context) {
    INJECT();
    return cuCtxDestroy_v2(context);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return may_be_current(context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out) {
    ENTER();
    struct thread_state *thread = thread_state();
    if (!thread->depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    thread->depth--;
    if (out)
        *out = thread->stack[thread->depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    INJECT();
    return cuCtxPushCurrent_v2(context);
}
CUresult cuCtxPopCurrent(CUcontext *out) {
    INJECT();
    return cuCtxPopCurrent_v2(out);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    struct thread_state *thread = thread_state();
    if (context && !may_be_current(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!context)
        thread->depth -= thread->depth > 0;
    else if (thread->depth)
        thread->stack[thread->depth - 1] = context;
    else
        return push(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
    ENTER();
    struct thread_state *thread = thread_state();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER_CONTEXT(context);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

/* The context that a call names; NULL: the current context. */
static CUresult named(CUcontext handle, CUcontext *out) {
    if (!handle)
        return current_context(out);
    ENTER();
    *out = handle;
    return object_is(handle, OBJECT_CONTEXT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
    INJECT();
    CUcontext context;
    CUresult result = named(handle, &context);
    if (result || !device)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags) {
    ENTER_CONTEXT(context);
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
    ENTER_CONTEXT(context);
    if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    context->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    INJECT();
    CUcontext context;
    CUresult result = named(handle, &context);
    if (result || !id)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
    INJECT();
    CUcontext context;
    CUresult result = named(handle, &context);
    if (result || !version)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *version = context->api_version;
    return CUDA_SUCCESS;
}

static CUresult synchronize(CUcontext context) {
    CUresult result = capture_forbids(NULL);
    if (result)
        return result;
    context_wait(context);
    events_settle();
    pools_trim(context->card);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER_CONTEXT(context);
    CUgreenCtx green = current_green();
    return synchronize(green ? green->handle : context);
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
    INJECT();
    CUcontext context;
    CUresult result = named(handle, &context);
    return result ? result : synchronize(context);
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    ENTER_CONTEXT(context);
    if ((unsigned)limit >= sizeof context->limits / sizeof *context->limits)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    ENTER_CONTEXT(context);
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)limit >= sizeof context->limits / sizeof *context->limits)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
    ENTER_CONTEXT(context);
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = context->cache;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    ENTER_CONTEXT(context);
    context->cache = config;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config) {
    INJECT();
    CUresult result = cuCtxGetDevice(&(CUdevice){0});
    if (result || !config)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
    INJECT();
    (void)config;
    return cuCtxGetDevice(&(CUdevice){0});
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    INJECT();
    CUresult result = cuCtxGetDevice(&(CUdevice){0});
    if (result)
        return result;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void) {
    INJECT();
    return cuCtxGetDevice(&(CUdevice){0});
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    ENTER_CONTEXT(context);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(peer, OBJECT_CONTEXT) || peer == context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!driver.sim.profile->nvlinks || peer->card == context->card)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (context->peers >> peer->device & 1)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context->peers |= 1u << peer->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER_CONTEXT(context);
    if (!object_is(peer, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!(context->peers >> peer->device & 1))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    context->peers &= ~(1u << peer->device);
    return CUDA_SUCCESS;
}
