/* Device, managed and host allocations. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/driver.h"

#define PITCH 512u

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT(context);
    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    shareable_adopt();
    *total = sim_usable(driver.sim.profile);
    *free_bytes = *total - sim_used(&driver.sim, context->card);
    return CUDA_SUCCESS;
}

static CUresult allocate(CUcontext context, CUdeviceptr *out, uint64_t bytes) {
    CUresult result = charge(context->card, bytes);
    if (result)
        return result;
    CUdeviceptr address = block_new(bytes, context, BLOCK_DEVICE, NULL);
    if (!address) {
        uncharge(context->card, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = address;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    ENTER_CONTEXT(context);
    CUresult result = capture_forbids(NULL);
    return !out || !bytes ? CUDA_ERROR_INVALID_VALUE : result ? result : allocate(context, out, bytes);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element) {
    ENTER_CONTEXT(context);
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (!out || !pitch || !width || !height || (element != 4 && element != 8 && element != 16) || row < width)
        return CUDA_ERROR_INVALID_VALUE;
    if (height > SIZE_MAX / row)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = capture_forbids(NULL);
    if (!result)
        result = allocate(context, out, row * height);
    if (!result)
        *pitch = row;
    return result;
}

static void range_unmap(const struct range *range) {
    if (range->managed)
        managed_free(range->managed);
    else if (range->kind == RANGE_MANAGED)
        uncharge(range->card, range->size);
    else
        sim_host_sub(&driver.sim, range->card, range->size);
    if (range->kind != RANGE_REGISTERED)
        munmap((void *)range->base, range->size);
}

CUresult memory_free(CUdeviceptr address) {
    struct block block;
    if (block_take(address, BLOCK_EXTERNAL, &block)) {
        if (block.kind == BLOCK_POOL)
            return pool_release(&block);
        if (block.kind == BLOCK_GRAPH) {
            graph_memory_release(&block);
            return CUDA_SUCCESS;
        }
        if (block.kind == BLOCK_EXTERNAL) {
            external_release(&block);
            return CUDA_SUCCESS;
        }
        if (block.shared)
            ipc_forget(&block);
        uncharge(block.context->card, block.size);
        return CUDA_SUCCESS;
    }
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    if (range && range->kind == RANGE_MANAGED && range->base == address) {
        range_unmap(range);
        range_remove(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* In effect this waits for the device, so a capture forbids it. It may also free memory that a graph under construction
 * names. */
CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER();
    if (!address)
        return CUDA_SUCCESS;
    CUresult result = capture_forbids(NULL);
    return result ? result : memory_free(address);
}

static bool range_of(const struct range *range, void *context) {
    return range->context == context &&
           (range->kind == RANGE_MANAGED || range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED);
}

static void range_gone(const struct range *range, void *context) {
    (void)context;
    range_unmap(range);
}

void ranges_of_context_drop(CUcontext context) {
    pthread_mutex_lock(&driver.lock);
    range_each(range_of, range_gone, context);
    pthread_mutex_unlock(&driver.lock);
}

/* Host memory in the program's address space that the driver knows. */
static CUresult map_host(CUcontext context, void **out, size_t bytes, enum range_kind kind, unsigned flags,
                         struct managed *managed) {
    char *pages = zero_pages(bytes);
    CUresult result = pages ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    struct range range = {.base = (uintptr_t)pages,
                          .size = bytes,
                          .kind = kind,
                          .flags = flags,
                          .context = context,
                          .managed = managed,
                          .card = context->card};
    if (pages && !range_add(&range)) {
        munmap(pages, bytes);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (pages && kind == RANGE_HOST) {
        sim_host_add(&driver.sim, range.card, bytes);
    }
    pthread_mutex_unlock(&driver.lock);
    *out = result ? NULL : pages;
    return result;
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
    ENTER_CONTEXT(context);
    void *pages;
    if (!out || !bytes || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = capture_forbids(NULL);
    bool migrate = driver.sim.timing.migrate;
    struct managed *managed = !result && migrate ? managed_new(context->card, bytes) : NULL;
    if (!result && !managed)
        result = migrate ? CUDA_ERROR_OUT_OF_MEMORY : charge(context->card, bytes);
    if (result)
        return result;
    result = map_host(context, &pages, bytes, RANGE_MANAGED, flags, managed);
    if (result && migrate)
        managed_free(managed);
    else if (result)
        uncharge(context->card, bytes);
    else
        *out = (CUdeviceptr)(uintptr_t)pages;
    return result;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
    ENTER_CONTEXT(context);
    if (!out || !bytes || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = capture_forbids(NULL);
    return result ? result : map_host(context, out, bytes, RANGE_HOST, flags | CU_MEMHOSTALLOC_DEVICEMAP, NULL);
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
    INJECT();
    return cuMemHostAlloc(out, bytes, 0);
}

CUresult cuMemFreeHost(void *address) {
    ENTER();
    CUresult result = capture_forbids(NULL);
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find((uintptr_t)address, false);
    if (range && range->kind == RANGE_HOST && range->base == (uintptr_t)address) {
        range_unmap(range);
        range_remove(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
    ENTER_CONTEXT(context);
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = capture_forbids(NULL);
    if (result)
        return result;
    struct range range = {.base = (uintptr_t)address,
                          .size = bytes,
                          .kind = RANGE_REGISTERED,
                          .flags = flags,
                          .context = context,
                          .card = context->card};
    pthread_mutex_lock(&driver.lock);
    if (range_overlap((uintptr_t)address, bytes, false))
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (!range_add(&range))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else
        sim_host_add(&driver.sim, range.card, bytes);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags) {
    INJECT();
    return cuMemHostRegister_v2(address, bytes, flags);
}

CUresult cuMemHostUnregister(void *address) {
    ENTER();
    CUresult result = capture_forbids(NULL);
    if (result)
        return result;
    result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find((uintptr_t)address, false);
    if (range && range->kind == RANGE_REGISTERED && range->base == (uintptr_t)address) {
        range_unmap(range);
        range_remove(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* Advice has no effect here. */
static CUresult advise(CUdeviceptr address, size_t bytes) {
    ENTER();
    struct place place = place_of(address);
    return place.managed && bytes && address + bytes <= place.base + place.size ? CUDA_SUCCESS
                                                                                : CUDA_ERROR_INVALID_VALUE;
}

/* Advice about reading, and taking a preference back, name no location. */
static bool names_place(CUmem_advise advice) {
    return advice != CU_MEM_ADVISE_SET_READ_MOSTLY && advice != CU_MEM_ADVISE_UNSET_READ_MOSTLY &&
           advice != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
}

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device) {
    INJECT();
    if ((unsigned)advice - 1 >= CU_MEM_ADVISE_UNSET_ACCESSED_BY)
        return CUDA_ERROR_INVALID_VALUE;
    if (names_place(advice) && (device < CU_DEVICE_CPU || device >= driver.count))
        return CUDA_ERROR_INVALID_DEVICE;
    return advise(address, bytes);
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location) {
    INJECT();
    bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if ((unsigned)advice - 1 >= CU_MEM_ADVISE_UNSET_ACCESSED_BY ||
        (names_place(advice) && location.type == CU_MEM_LOCATION_TYPE_INVALID))
        return CUDA_ERROR_INVALID_VALUE;
    if (names_place(advice) && device && (location.id < 0 || location.id >= driver.count))
        return CUDA_ERROR_INVALID_DEVICE;
    return advise(address, bytes);
}

static CUresult prefetch(CUdeviceptr address, size_t bytes, CUstream handle, bool to_card) {
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result)
        result = advise(address, bytes);
    if (result || !driver.sim.timing.migrate)
        return result;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    bool moves = range && range->managed;
    uint64_t ns = !moves    ? 0
                  : to_card ? managed_touch(range, address, bytes, false)
                            : managed_leave(range, address, bytes);
    pthread_mutex_unlock(&driver.lock);
    if (ns)
        stream_engine(stream, to_card ? SIM_TO_CARD : SIM_FROM_CARD, ns);
    return CUDA_SUCCESS;
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
    INJECT();
    return device < CU_DEVICE_CPU || device >= driver.count ? CUDA_ERROR_INVALID_DEVICE
                                                            : prefetch(address, bytes, stream, device != CU_DEVICE_CPU);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,
                               CUstream stream) {
    INJECT();
    bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    return flags || (device && (location.id < 0 || location.id >= driver.count))
               ? CUDA_ERROR_INVALID_VALUE
               : prefetch(address, bytes, stream, device);
}
