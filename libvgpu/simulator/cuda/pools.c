/* Stream-ordered allocation. A pool reserves memory of the card in chunks and hands out parts of it. Free memory of a
 * pool goes back to the card when the program synchronises, down to the release threshold. It also goes back before an
 * allocation of this process is refused. */
#include <string.h>

#include "cuda/driver.h"

#define CHUNK (32 * MIB)
#define FINE (2 * MIB)
#define ROUND 512u

static uint64_t round_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}

static CUmemoryPool pool_new(int device, bool is_default, uint64_t maximum, CUmemAllocationHandleType handle_types) {
    CUmemoryPool pool = object_new(OBJECT_POOL);
    if (pool) {
        pool->device = device;
        pool->card = driver.visible[device];
        pool->is_default = is_default;
        pool->maximum = maximum;
        pool->handle_types = handle_types;
        for (int i = 0; i < 3; i++)
            pool->reuse[i] = 1;
        pthread_mutex_init(&pool->lock, NULL);
    }
    return pool;
}

CUresult pool_default(int device, CUmemoryPool *out) {
    pthread_mutex_lock(&driver.lock);
    if (!driver.default_pool[device])
        driver.default_pool[device] = pool_new(device, true, 0, CU_MEM_HANDLE_TYPE_NONE);
    *out = driver.default_pool[device];
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* With the pool's lock held. */
static void trim(CUmemoryPool pool, uint64_t keep) {
    uint64_t floor = round_up(pool->used, CHUNK);
    if (keep > floor)
        floor = keep;
    if (pool->reserved > floor) {
        uncharge(pool->card, pool->reserved - floor);
        pool->reserved = floor;
    }
}

static void trim_one(void *handle, void *card) {
    CUmemoryPool pool = handle;
    if (pool->card != *(int *)card || pthread_mutex_trylock(&pool->lock) != 0)
        return; /* a pool in use trims itself */
    if (pool->reserved > pool->threshold)
        trim(pool, pool->threshold);
    pthread_mutex_unlock(&pool->lock);
}

void pools_trim(int card) {
    static _Atomic int exist; /* programs without pools must synchronise as fast as before */
    if (!exist) {
        for (int i = 0; i < driver.count && !exist; i++)
            exist = driver.default_pool[i] || driver.current_pool[i];
        if (!exist)
            return;
    }
    object_each(OBJECT_POOL, trim_one, &card);
}

static CUresult reserve(CUmemoryPool pool, uint64_t bytes) {
    uint64_t missing = pool->used + bytes > pool->reserved ? pool->used + bytes - pool->reserved : 0;
    if (pool->maximum && pool->used + bytes > pool->maximum)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!missing)
        return CUDA_SUCCESS;
    uint64_t chunk = round_up(missing, CHUNK);
    CUresult result = charge(pool->card, chunk);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        chunk = round_up(missing, FINE);
        result = charge(pool->card, chunk);
    }
    if (!result) {
        pool->reserved += chunk;
        if (pool->reserved > pool->reserved_high)
            pool->reserved_high = pool->reserved;
    }
    return result;
}

static CUresult allocate(CUcontext context, CUdeviceptr *out, uint64_t bytes, CUmemoryPool pool) {
    uint64_t rounded = round_up(bytes, ROUND);
    if (rounded < bytes || rounded > driver.sim.profile->total)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&pool->lock);
    CUresult result = reserve(pool, rounded);
    CUdeviceptr address = result ? 0 : block_new(bytes, context, BLOCK_POOL, pool);
    if (!result && !address)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        pool->used += rounded;
        if (pool->used > pool->used_high)
            pool->used_high = pool->used;
        *out = address;
    }
    pthread_mutex_unlock(&pool->lock);
    return result;
}

/* With the pool's lock held; destroys the lock, too. */
static void end(CUmemoryPool pool) {
    uncharge(pool->card, pool->reserved);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_destroy(&pool->lock);
    object_free(pool);
}

CUresult pool_release(struct block *block) {
    CUmemoryPool pool = block->owner;
    pthread_mutex_lock(&pool->lock);
    pool->used -= round_up(block->size, ROUND);
    if (pool->object.type == OBJECT_POOL_LEAVING && !pool->used)
        end(pool);
    else
        pthread_mutex_unlock(&pool->lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    if (!out || !bytes || !object_is(pool, OBJECT_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    result = capture_alloc(stream, out, bytes);
    return result == CUDA_ERROR_NOT_READY ? allocate(stream->context, out, bytes, pool) : result;
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream handle) {
    INJECT();
    CUstream stream;
    CUmemoryPool pool;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    pool = driver.current_pool[stream->context->device];
    if (!pool)
        result = pool_default(stream->context->device, &pool);
    return result ? result : cuMemAllocFromPoolAsync(out, bytes, pool, handle);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    result = capture_free(stream, address);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    return address ? memory_free(address) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER_DEVICE(device);
    return out ? pool_default(device, out) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER_DEVICE(device);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = driver.current_pool[device];
    return *out ? CUDA_SUCCESS : pool_default(device, out);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    ENTER_DEVICE(device);
    if (!object_is(pool, OBJECT_POOL) || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    driver.current_pool[device] = pool;
    return CUDA_SUCCESS;
}

static CUresult location_check(const CUmemLocation *location, CUmemAllocationType type) {
    if (!location || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? device_check(location->id) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER();
    CUresult result = location_check(location, type);
    return result ? result : cuDeviceGetDefaultMemPool(out, location->id);
}

CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER();
    CUresult result = location_check(location, type);
    return result ? result : cuDeviceGetMemPool(out, location->id);
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    ENTER();
    CUresult result = location_check(location, type);
    return result ? result : cuDeviceSetMemPool(location->id, pool);
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    ENTER();
    if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (props->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (props->location.id < 0 || props->location.id >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    CUmemoryPool pool, fallback;
    CUresult result = pool_default(props->location.id, &fallback); /* once it exists, synchronisation trims pools */
    if (result)
        return result;
    pool = pool_new(props->location.id, false, props->maxSize, props->handleTypes);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = pool;
    return CUDA_SUCCESS;
}

/* cuda.h: a pool with outstanding allocations keeps its resources until the last of them has been freed. */
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTER();
    if (!object_is(pool, OBJECT_POOL) || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver.current_pool[pool->device] == pool)
        driver.current_pool[pool->device] = NULL;
    pthread_mutex_lock(&pool->lock);
    pool->object.type = OBJECT_POOL_LEAVING;
    if (pool->used)
        pthread_mutex_unlock(&pool->lock);
    else
        end(pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    ENTER();
    if (!object_is(pool, OBJECT_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pool->lock);
    trim(pool, keep);
    pthread_mutex_unlock(&pool->lock);
    return CUDA_SUCCESS;
}

/* With the pool's lock held. */
static CUresult attribute_of(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: *(int *)value = pool->reuse[0]; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: *(int *)value = pool->reuse[1]; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->reuse[2]; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(cuuint64_t *)value = pool->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = pool->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = pool->used_high; break;
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE: *(CUmemAllocationType *)value = CU_MEM_ALLOCATION_TYPE_PINNED; break;
    case CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES: *(CUmemAllocationHandleType *)value = pool->handle_types; break;
    case CU_MEMPOOL_ATTR_LOCATION_ID: *(int *)value = pool->device; break;
    case CU_MEMPOOL_ATTR_LOCATION_TYPE: *(CUmemLocationType *)value = CU_MEM_LOCATION_TYPE_DEVICE; break;
    case CU_MEMPOOL_ATTR_MAX_POOL_SIZE: *(cuuint64_t *)value = pool->maximum; break;
    case CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED: *(int *)value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    ENTER();
    if (!object_is(pool, OBJECT_POOL) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pool->lock);
    CUresult result = attribute_of(pool, attribute, value);
    pthread_mutex_unlock(&pool->lock);
    return result;
}

/* With the pool's lock held. */
static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: pool->reuse[0] = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: pool->reuse[1] = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->reuse[2] = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = *(const cuuint64_t *)value; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(const cuuint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE; /* only a reset is allowed */
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
            pool->reserved_high = pool->reserved;
        else
            pool->used_high = pool->used;
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    ENTER();
    if (!object_is(pool, OBJECT_POOL) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pool->lock);
    CUresult result = set_attribute(pool, attribute, value);
    pthread_mutex_unlock(&pool->lock);
    return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count) {
    ENTER();
    if (!object_is(pool, OBJECT_POOL) || (count && !map))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || map[i].location.id < 0 ||
            map[i].location.id >= driver.count)
            return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < count; i++) {
        uint32_t bit = 1u << map[i].location.id;
        pool->readers = map[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? pool->readers | bit : pool->readers & ~bit;
        pool->writers = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? pool->writers | bit : pool->writers & ~bit;
    }
    pthread_mutex_unlock(&pool->lock);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location) {
    ENTER();
    if (!flags || !location || !object_is(pool, OBJECT_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 || location->id >= driver.count)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t bit = 1u << location->id;
    pthread_mutex_lock(&pool->lock);
    *flags = location->id == pool->device || pool->writers & bit ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : pool->readers & bit                               ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    pthread_mutex_unlock(&pool->lock);
    return CUDA_SUCCESS;
}
