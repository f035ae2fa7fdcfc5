/* Queries about pointers. */
#include <string.h>

#include "cuda/driver.h"

/* The card whose access an attribute reports. */
static int ordinal_here(void) {
    CUcontext context;
    return current_context(&context) == CUDA_SUCCESS ? context->device : 0;
}

struct place place_of(CUdeviceptr address) {
    struct place place = {.card = -1};
    struct block *block = block_find(address, &place.base);
    if (block) {
        place.known = true;
        place.size = block->size;
        place.id = block->id;
        place.context = block->context;
        place.synchronous = block->synchronous;
        place.access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        place.pool = block->kind == BLOCK_POOL ? block->owner : NULL;
        place.handle_types = place.pool ? (unsigned)place.pool->handle_types : 0;
        place.imported = block->kind == BLOCK_IMPORTED || block->kind == BLOCK_EXTERNAL;
        place.card = place.pool                      ? place.pool->card
                     : block->kind == BLOCK_IMPORTED ? ipc_card(place.base)
                                                     : block->context->card;
        return place;
    }
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false), *reserved = range_find(address, true);
    if (reserved) {
        place.known = place.virtual = true;
        place.base = reserved->base;
        place.size = reserved->size;
        place.id = reserved->id;
    }
    if (range) {
        place.virtual = range->kind == RANGE_MAPPED;
        if (!place.known) {
            place.base = range->base;
            place.size = range->size;
        }
        place.known = true;
        place.id = range->id;
        place.context = range->context;
        place.flags = range->flags;
        place.managed = range->kind == RANGE_MANAGED;
        place.synchronous = range->synchronous;
        place.host = range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED ||
                     (place.virtual && range->physical->card < 0);
        place.card = place.virtual ? range->physical->card : range->context ? range->context->card : -1;
    }
    if (range && place.virtual) {
        place.mapping = range->base;
        place.mapping_size = range->size;
        place.access = access_of(range, ordinal_here());
        place.handle_types = (unsigned)range->physical->properties.requestedHandleTypes;
        place.host = place.host && !range->physical->multicast;
    }
    pthread_mutex_unlock(&driver.lock);
    return place;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER();
    struct place place = place_of(address);
    if (!place.known || (place.virtual && !place.mapping_size))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = place.virtual ? place.mapping : place.base;
    if (size)
        *size = place.virtual ? place.mapping_size : place.size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned int flags) {
    ENTER();
    struct place place = place_of((CUdeviceptr)(uintptr_t)address);
    if (!out || flags || !place.known || !place.host)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)address;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *address) {
    ENTER();
    struct place place = place_of((CUdeviceptr)(uintptr_t)address);
    if (!flags || !place.known || !place.host)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = place.flags;
    return CUDA_SUCCESS;
}

static int ordinal_of(int card) {
    for (int i = 0; i < driver.count; i++)
        if (driver.visible[i] == card)
            return i;
    return CU_DEVICE_CPU;
}

/* For a reservation without a mapping, the driver only knows its range, and that nothing is mapped. */
static bool known_of_reservation(CUpointer_attribute attribute) {
    return attribute == CU_POINTER_ATTRIBUTE_MAPPED || attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
           attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE || attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID ||
           attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
}

static CUresult attribute_of(const struct place *place, CUdeviceptr address, CUpointer_attribute attribute, void *out) {
    bool device = !place->host && !place->managed;
    if (place->virtual && !place->mapping_size && !known_of_reservation(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = place->virtual ? NULL : place->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = place->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (device || place->virtual)
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)out = address;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)out = place->synchronous; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = place->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)out = place->managed; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = ordinal_of(place->card); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)out = device && !place->virtual && !place->pool && !place->imported;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = place->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = place->size; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)out = !place->virtual || place->mapping_size; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = place->handle_types; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)out = device; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(int *)out = place->virtual ? (int)place->access : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)out = place->pool; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = place->virtual ? place->mapping_size : place->size; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)out = place->virtual ? place->mapping : place->base;
        break;
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE: *(int *)out = 0; break;
    default:
        return (unsigned)attribute - 1 < CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE ? CUDA_ERROR_NOT_SUPPORTED
                                                                                       : CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER();
    struct place place = place_of(address);
    return out && place.known ? attribute_of(&place, address, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

static size_t attribute_size(CUpointer_attribute attribute) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE: return sizeof(int);
    default: return sizeof(void *);
    }
}

/* Unlike the single query, an unknown pointer is no error: its attributes are 0. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address) {
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

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER();
    CUdeviceptr base;
    struct block *block = block_find(address, &base);
    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    bool on = *(const int *)value != 0;
    if (block) {
        block->synchronous = on;
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    if (range)
        range->synchronous = on;
    pthread_mutex_unlock(&driver.lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
