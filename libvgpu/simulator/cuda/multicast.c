/* Multicast objects: one address for the memory of several cards. Only special kernel instructions use such an address,
 * and simulated kernels compute nothing. So an object only has rules: which cards take part, and what is bound where.
 * It costs no memory itself; bound memory stays until it is unbound. */
#include <stdlib.h>

#include "cuda/driver.h"

#define GRANULARITY (2 * MIB)

struct multicast {
    unsigned wanted, devices; /* number of cards; a bit for each added ordinal */
    struct binding {
        struct binding *next;
        struct physical *memory;
        int device;
        uint64_t offset, size;
    } *bindings;
};

static CUresult supported(const CUmulticastObjectProp *properties) {
    const struct sim_profile *profile = driver.sim.profile;
    if (!properties || properties->flags ||
        properties->handleTypes & ~(unsigned long long)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !properties->size ||
        !properties->numDevices || (int)properties->numDevices > driver.count)
        return CUDA_ERROR_INVALID_VALUE;
    return multicast_supported(profile, driver.sim.state->card_count) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

bool multicast_supported(const struct sim_profile *profile, uint32_t cards) {
    return profile->major >= 9 && profile->nvlinks && cards > 1;
}

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties,
                                   CUmulticastGranularity_flags option) {
    ENTER();
    if (!granularity || (option != CU_MULTICAST_GRANULARITY_MINIMUM && option != CU_MULTICAST_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = supported(properties);
    if (!result)
        *granularity = GRANULARITY;
    return result;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *properties) {
    ENTER();
    CUresult result = supported(properties);
    if (result || !out || properties->size % GRANULARITY)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    struct multicast *multicast = calloc(1, sizeof *multicast);
    struct physical *physical = multicast ? object_new(OBJECT_PHYSICAL) : NULL;
    if (!physical) {
        free(multicast);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    multicast->wanted = properties->numDevices;
    physical->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    physical->multicast = multicast;
    physical->card = -1;
    physical->size = properties->size;
    physical->references = physical->handles = 1;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

/* With driver.lock held, like the helpers below. */
static void unbind(struct binding **at) {
    struct binding *binding = *at;
    *at = binding->next;
    physical_drop(binding->memory);
    free(binding);
}

void multicast_free(struct multicast *multicast) {
    while (multicast->bindings)
        unbind(&multicast->bindings);
    free(multicast);
}

static struct physical *object_of(CUmemGenericAllocationHandle handle) {
    struct physical *physical = physical_of(handle);
    return physical && physical->multicast ? physical : NULL;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
    ENTER_DEVICE(device);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct physical *object = object_of(handle);
    struct multicast *multicast = object ? object->multicast : NULL;
    if (multicast && !(multicast->devices >> device & 1) &&
        (unsigned)__builtin_popcount(multicast->devices) < multicast->wanted) {
        multicast->devices |= 1u << device;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

static CUresult bind(struct physical *object, size_t offset, struct physical *memory, size_t memory_offset, size_t size,
                     unsigned long long flags) {
    if (!object || !memory || memory->multicast || memory->card < 0 || flags || !size || offset % GRANULARITY ||
        memory_offset % GRANULARITY || size % GRANULARITY || offset > object->size || size > object->size - offset ||
        memory_offset > memory->size || size > memory->size - memory_offset)
        return CUDA_ERROR_INVALID_VALUE;
    struct multicast *multicast = object->multicast;
    int device = memory->properties.location.id;
    if ((unsigned)__builtin_popcount(multicast->devices) < multicast->wanted)
        return CUDA_ERROR_INVALID_VALUE; /* all cards must be added first */
    if (!(multicast->devices >> device & 1))
        return CUDA_ERROR_INVALID_DEVICE;
    for (struct binding *binding = multicast->bindings; binding; binding = binding->next)
        if (binding->device == device && binding->offset < offset + size && offset < binding->offset + binding->size)
            return CUDA_ERROR_INVALID_VALUE;
    struct binding *binding = calloc(1, sizeof *binding);
    if (!binding)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *binding = (struct binding){
        .next = multicast->bindings, .memory = memory, .device = device, .offset = offset, .size = size};
    multicast->bindings = binding;
    memory->references++;
    return CUDA_SUCCESS;
}

/* `device`: the required place of the memory; -1: any place. */
static CUresult bind_memory(CUmemGenericAllocationHandle handle, int device, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
                            unsigned long long flags) {
    pthread_mutex_lock(&driver.lock);
    struct physical *physical = physical_of(memory);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (physical && (device < 0 || physical->properties.location.id == device))
        result = bind(object_of(handle), offset, physical, memory_offset, size, flags);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

static CUresult bind_mapped(CUmemGenericAllocationHandle handle, int device, size_t offset, CUdeviceptr address,
                            size_t size, unsigned long long flags) {
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    bool mapped = range && range->kind == RANGE_MAPPED && size <= range->base + range->size - address;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (mapped && (device < 0 || range->physical->properties.location.id == device))
        result = bind(object_of(handle), offset, range->physical, range->offset + (address - range->base), size, flags);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                            size_t memory_offset, size_t size, unsigned long long flags) {
    ENTER();
    return bind_memory(handle, -1, offset, memory, memory_offset, size, flags);
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                               CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
                               unsigned long long flags) {
    ENTER_DEVICE(device);
    return bind_memory(handle, device, offset, memory, memory_offset, size, flags);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address, size_t size,
                             unsigned long long flags) {
    ENTER();
    return bind_mapped(handle, -1, offset, address, size, flags);
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                                CUdeviceptr address, size_t size, unsigned long long flags) {
    ENTER_DEVICE(device);
    return bind_mapped(handle, device, offset, address, size, flags);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size) {
    ENTER_DEVICE(device);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct physical *object = object_of(handle);
    for (struct binding **at = object ? &object->multicast->bindings : NULL; at && *at;)
        if ((*at)->device == device && (*at)->offset >= offset && (*at)->offset + (*at)->size <= offset + size) {
            unbind(at);
            result = CUDA_SUCCESS;
        } else {
            at = &(*at)->next;
        }
    pthread_mutex_unlock(&driver.lock);
    return result;
}
