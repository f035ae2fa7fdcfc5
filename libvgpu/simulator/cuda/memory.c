/* Device, managed and host allocations, and what can be asked about a pointer. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/driver.h"

#define PITCH 512u

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER_CONTEXT(context);
    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    shareable_adopt();
    *total = sim_usable(driver.sim.profile);
    *free_bytes = *total - sim_used(&driver.sim, context->card);
    return CUDA_SUCCESS;
}

static CUresult allocate(CUcontext context, CUdeviceptr *out, uint64_t bytes)
{
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

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER_CONTEXT(context);
    CUresult result = capture_forbids(NULL);
    return !out || !bytes ? CUDA_ERROR_INVALID_VALUE : result ? result : allocate(context, out, bytes);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    ENTER_CONTEXT(context);
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (!out || !pitch || !width || !height || (element != 4 && element != 8 && element != 16) || row < width)
        return CUDA_ERROR_INVALID_VALUE;
    if (height > SIZE_MAX / row)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = allocate(context, out, row * height);
    if (!result)
        *pitch = row;
    return result;
}

static void range_unmap(const struct range *range)
{
    if (range->kind == RANGE_MANAGED)
        uncharge(range->context->card, range->size);
    if (range->kind != RANGE_REGISTERED)
        munmap((void *)range->base, range->size);
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    struct block block;
    ENTER();
    if (!address)
        return CUDA_SUCCESS;
    if (block_take(address, BLOCK_EXTERNAL, &block)) {
        if (block.kind == BLOCK_POOL)
            return pool_release(&block);
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

static bool range_of(const struct range *range, void *context)
{
    return range->context == context && (range->kind == RANGE_MANAGED || range->kind == RANGE_HOST);
}

static void range_gone(const struct range *range, void *context)
{
    (void)context;
    range_unmap(range);
}

void ranges_of_context_drop(CUcontext context)
{
    pthread_mutex_lock(&driver.lock);
    range_each(range_of, range_gone, context);
    pthread_mutex_unlock(&driver.lock);
}

/* Host memory of the program's address space that the driver knows about. */
static CUresult map_host(CUcontext context, void **out, size_t bytes, enum range_kind kind, unsigned flags)
{
    char *pages = zero_pages(bytes);
    CUresult result = pages ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    if (pages && !range_add(&(struct range){.base = (uintptr_t)pages, .size = bytes, .kind = kind, .flags = flags, .context = context})) {
        munmap(pages, bytes);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&driver.lock);
    *out = result ? NULL : pages;
    return result;
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    void *pages;
    if (!out || !bytes || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = charge(context->card, bytes);
    if (result)
        return result;
    result = map_host(context, &pages, bytes, RANGE_MANAGED, flags);
    if (result)
        uncharge(context->card, bytes);
    else
        *out = (CUdeviceptr)(uintptr_t)pages;
    return result;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    if (!out || !bytes || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    return map_host(context, out, bytes, RANGE_HOST, flags | CU_MEMHOSTALLOC_DEVICEMAP);
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

CUresult cuMemFreeHost(void *address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    ENTER();
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

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    if (range_overlap((uintptr_t)address, bytes, false))
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (!range_add(&(struct range){.base = (uintptr_t)address, .size = bytes, .kind = RANGE_REGISTERED, .flags = flags, .context = context}))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags) { return cuMemHostRegister_v2(address, bytes, flags); }

CUresult cuMemHostUnregister(void *address)
{
    CUresult result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    ENTER();
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find((uintptr_t)address, false);
    if (range && range->kind == RANGE_REGISTERED && range->base == (uintptr_t)address) {
        range_remove(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* What is known about an address; false: nothing. */
struct place {
    CUdeviceptr base;
    uint64_t size, id;
    CUcontext context;
    CUmemoryPool pool;
    unsigned flags;
    int card;
    bool known, host, managed, virtual, imported;
};

static struct place place_of(CUdeviceptr address)
{
    struct place place = {.card = -1};
    struct block *block = block_find(address, &place.base);
    if (block) {
        place.known = true;
        place.size = block->size;
        place.id = block->id;
        place.context = block->context;
        place.pool = block->kind == BLOCK_POOL ? block->owner : NULL;
        place.imported = block->kind == BLOCK_IMPORTED || block->kind == BLOCK_EXTERNAL;
        place.card = place.pool ? place.pool->card : block->kind == BLOCK_IMPORTED ? ipc_card(place.base) : block->context->card;
        return place;
    }
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    if (range) {
        place.known = true;
        place.base = range->base;
        place.size = range->size;
        place.id = range->id;
        place.context = range->context;
        place.flags = range->flags;
        place.managed = range->kind == RANGE_MANAGED;
        place.virtual = range->kind == RANGE_MAPPED;
        place.host = range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED || (place.virtual && range->physical->card < 0);
        place.card = place.virtual ? range->physical->card : range->context ? range->context->card : -1;
    }
    pthread_mutex_unlock(&driver.lock);
    return place;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    ENTER();
    struct place place = place_of(address);
    if (!place.known)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = place.base;
    if (size)
        *size = place.size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned int flags)
{
    ENTER();
    struct place place = place_of((CUdeviceptr)(uintptr_t)address);
    if (!out || flags || !place.known || !place.host)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)address;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *address)
{
    ENTER();
    struct place place = place_of((CUdeviceptr)(uintptr_t)address);
    if (!flags || !place.known || !place.host)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = place.flags;
    return CUDA_SUCCESS;
}

static int ordinal_of(int card)
{
    for (int i = 0; i < driver.count; i++)
        if (driver.visible[i] == card)
            return i;
    return CU_DEVICE_CPU;
}

static CUresult attribute_of(const struct place *place, CUdeviceptr address, CUpointer_attribute attribute, void *out)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = place->virtual ? NULL : place->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = place->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!place->host && !place->managed)
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)out = address;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = place->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)out = place->managed; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = ordinal_of(place->card); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)out = !place->host && !place->managed && !place->virtual && !place->pool && !place->imported; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = place->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = place->size; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)out = 1; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = place->pool ? (unsigned long long)place->pool->handle_types : 0; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)out = !place->host && !place->managed; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(int *)out = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)out = place->pool; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address)
{
    ENTER();
    struct place place = place_of(address);
    return out && place.known ? attribute_of(&place, address, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

static size_t attribute_size(CUpointer_attribute attribute)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return sizeof(int);
    default:
        return sizeof(void *);
    }
}

/* Unlike the single query: nothing is wrong with an unknown pointer, its attributes are 0. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address)
{
    ENTER();
    if (!count || !attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    struct place place = place_of(address);
    for (unsigned i = 0; i < count; i++) {
        if (!data[i])
            return CUDA_ERROR_INVALID_VALUE;
        if (place.known && attribute_of(&place, address, attributes[i], data[i]) == CUDA_SUCCESS)
            continue;
        memset(data[i], 0, attribute_size(attributes[i]));
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)data[i] = CU_DEVICE_INVALID;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    ENTER();
    struct place place = place_of(address);
    return value && place.known && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Advice moves nothing here: managed memory has one place. */
static CUresult advise(CUdeviceptr address, size_t bytes)
{
    ENTER();
    struct place place = place_of(address);
    return place.managed && bytes && address + bytes <= place.base + place.size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device)
{
    (void)advice, (void)device;
    return advise(address, bytes);
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
    (void)advice, (void)location;
    return advise(address, bytes);
}

static CUresult prefetch(CUdeviceptr address, size_t bytes, CUstream handle)
{
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    return result ? result : advise(address, bytes);
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream)
{
    return device < CU_DEVICE_CPU || device >= driver.count ? CUDA_ERROR_INVALID_DEVICE : prefetch(address, bytes, stream);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream)
{
    bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    return flags || (device && (location.id < 0 || location.id >= driver.count)) ? CUDA_ERROR_INVALID_VALUE : prefetch(address, bytes, stream);
}
