/* Virtual memory management: physical memory, address ranges, and mappings of one into the other. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/driver.h"

#define GRANULARITY (2 * MIB)

static CUresult captures_forbid(void) {
    return strict_about("captures") ? capture_forbids(NULL) : CUDA_SUCCESS;
}

static CUdeviceptr next_range = RESERVATION_WINDOW; /* there are enough addresses, so none is used twice */

/* CUDA 12.2 brought host locations. CUDA 12.9 brought the attribute that tells whether a card accepts them. CUDA 13.0
 * brought a location without a NUMA node (cuda.h of these versions). A card that shares the machine's memory does not
 * need them. */
bool host_memory_is_physical(void) {
    return sim_driver()->cuda >= 12020 && !driver.sim.profile->unified && !strict_about("host-memory");
}

static CUresult host_of(const CUmemLocation *location) {
    if (sim_driver()->cuda < (location->type == CU_MEM_LOCATION_TYPE_HOST ? 13000 : 12020))
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA &&
        (location->id < 0 || location->id >= sim_nodes(&driver.sim)))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* The card of a location; -1: host. */
static CUresult card_of(const CUmemLocation *location, int *card) {
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (location->id < 0 || location->id >= driver.count)
            return CUDA_ERROR_INVALID_DEVICE;
        *card = driver.visible[location->id];
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: *card = -1; return host_of(location);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Where physical memory can be made. The calling thread's node gives CUDA_ERROR_INVALID_VALUE, too, as cuMemCreate in
 * cuda.h says. */
static CUresult home_of(const CUmemAllocationProp *properties, int *card) {
    const CUmemLocation *location = &properties->location;
    CUresult result =
        location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT ? CUDA_ERROR_INVALID_VALUE : card_of(location, card);
    if (!result && *card < 0 && !host_memory_is_physical())
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (!result && location->type == CU_MEM_LOCATION_TYPE_HOST && properties->requestedHandleTypes)
        result = CUDA_ERROR_INVALID_VALUE;
    return result;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    ENTER();
    int card;
    if (!granularity || !properties ||
        (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = home_of(properties, &card);
    if (!result)
        *granularity = GRANULARITY;
    return result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    ENTER();
    int card;
    if (!out || !size || size % GRANULARITY || !properties || flags ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = home_of(properties, &card);
    if (result)
        return result;
    if (!driver_register())
        return CUDA_ERROR_OPERATING_SYSTEM;
    result = card >= 0 ? charge(card, size) : CUDA_SUCCESS;
    if (result)
        return result;
    struct physical *physical = object_new(OBJECT_PHYSICAL);
    if (!physical) {
        if (card >= 0)
            uncharge(card, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->properties = *properties;
    physical->card = card;
    physical->size = size;
    physical->references = physical->handles = 1;
    if (card < 0) {
        physical->account = host_account();
        sim_host_add(&driver.sim, physical->account, size);
    }
    *out = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

/* With driver.lock held. The memory stays while a handle or a mapping names it. */
void physical_drop(struct physical *physical) {
    if (--physical->references)
        return;
    if (physical->multicast)
        multicast_free(physical->multicast);
    bool pays = !physical->shareable || shareable_leave(physical);
    if (physical->contents)
        munmap(physical->contents, physical->size);
    if (pays && physical->card >= 0)
        uncharge(physical->card, physical->size);
    else if (pays && !physical->multicast)
        sim_host_sub(&driver.sim, physical->account, physical->size);
    object_free(physical);
}

struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    return object_is(physical, OBJECT_PHYSICAL) && physical->handles ? physical : NULL;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct physical *physical = physical_of(handle);
    if (physical) {
        physical->handles--;
        physical_drop(physical);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    ENTER();
    (void)hint; /* only a hint */
    if (!out || !size || size % GRANULARITY || flags || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    CUresult result = captures_forbid();
    if (result)
        return result;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    CUdeviceptr base = (next_range + alignment - 1) & ~(CUdeviceptr)(alignment - 1);
    if (base >= next_range && size <= WINDOW_END - base &&
        range_add(&(struct range){.base = base, .size = size, .kind = RANGE_RESERVED})) {
        next_range = base + size;
        *out = base;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER();
    CUresult result = captures_forbid();
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, true);
    if (range && range->base == address && range->size == size && !range_overlap(address, size, false)) {
        range_remove(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER();
    CUresult result = captures_forbid();
    if (result)
        return result;
    uint64_t begin = sim_now();
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct physical *physical = physical_of(handle);
    struct range *reserved = range_find(address, true);
    if (physical && reserved && size && !flags && !offset && address % GRANULARITY == 0 && size % GRANULARITY == 0 &&
        size <= physical->size && (size == physical->size || !strict_about("whole-blocks")) &&
        address + size <= reserved->base + reserved->size && !range_overlap(address, size, false) &&
        range_add(&(struct range){.base = address, .size = size, .kind = RANGE_MAPPED, .physical = physical})) {
        physical->references++;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    if (!result)
        bus_remap(begin);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER();
    CUresult forbidden = captures_forbid();
    if (forbidden)
        return forbidden;
    uint64_t begin = sim_now();
    pthread_mutex_lock(&driver.lock);
    /* only whole mappings, all of them inside the range */
    CUdeviceptr at = address;
    bool any = false, whole = size && size % GRANULARITY == 0;
    for (struct range *range; whole && (range = range_overlap(at, address + size - at, false));
         at = range->base + range->size) {
        any = true;
        whole = range->kind == RANGE_MAPPED && range->base >= address && range->base + range->size <= address + size;
        if (range->base + range->size >= address + size)
            break;
    }
    for (struct range *range; any && whole && (range = range_overlap(address, size, false));) {
        struct physical *physical = range->physical;
        touch_unmap(range);
        range_remove(range);
        physical_drop(physical);
    }
    pthread_mutex_unlock(&driver.lock);
    if (any && whole)
        bus_remap(begin);
    return any && whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A location is a card or the host (on any NUMA node). */
static uint32_t bit_of(int device) {
    return 1u << (device < 0 ? SIM_CARDS : device);
}

static int device_of(const CUmemLocation *location) {
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : -1;
}

CUmemAccess_flags access_of(const struct range *range, int device) {
    return range->writers & bit_of(device)   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : range->readers & bit_of(device) ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                             : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

static void set_access(struct range *range, const CUmemAccessDesc *descriptor) {
    uint32_t bit = bit_of(device_of(&descriptor->location));
    range->readers = descriptor->flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? range->readers | bit : range->readers & ~bit;
    range->writers =
        descriptor->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? range->writers | bit : range->writers & ~bit;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptors, size_t count) {
    ENTER();
    if (!size || !descriptors || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int card;
        CUresult result = card_of(&descriptors[i].location, &card);
        if (result)
            return result;
    }
    CUresult result = captures_forbid();
    if (result)
        return result;
    uint64_t begin = sim_now();
    pthread_mutex_lock(&driver.lock);
    for (CUdeviceptr at = address; at < address + size && !result;) {
        struct range *range = range_find(at, false);
        if (!range || range->kind != RANGE_MAPPED) {
            result = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        for (size_t i = 0; i < count; i++)
            set_access(range, &descriptors[i]);
        at = range->base + range->size;
    }
    pthread_mutex_unlock(&driver.lock);
    if (!result)
        bus_remap(begin);
    return result;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    ENTER();
    int card;
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = card_of(location, &card);
    if (result)
        return result;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    result = range && range->kind == RANGE_MAPPED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        *flags = access_of(range, device_of(location));
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    ENTER();
    pthread_mutex_lock(&driver.lock);
    struct physical *physical = physical_of(handle);
    CUresult result = properties && physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        *properties = physical->properties;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    ENTER();
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find((CUdeviceptr)(uintptr_t)address, false);
    CUresult result = out && range && range->kind == RANGE_MAPPED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!result) {
        range->physical->handles++;
        range->physical->references++;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)range->physical;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}
