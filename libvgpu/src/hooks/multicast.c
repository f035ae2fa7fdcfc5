/* Multicast objects have no memory of their own, but memory bound to them stays on its card. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "base/log.h"
#include "hooks/vmm.h"
#include "tier/blocks.h"

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
    CUDA_REAL(cuMulticastCreate);
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return real(handle, properties);
    struct vgpu_block *block = calloc(1, sizeof *block);
    struct vgpu_link *link = calloc(1, sizeof *link);
    CUmemGenericAllocationHandle made = 0;
    vgpu_blocks_lock();
    CUresult result = block && link ? real(handle ? &made : NULL, properties) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        *block = (struct vgpu_block){.kind = VGPU_BLOCK_MULTICAST, .references = 1};
        *link = (struct vgpu_link){.key = made, .count = 1, .block = block};
        vgpu_block_add_handle(link);
        *handle = made;
    }
    vgpu_blocks_unlock();
    if (result != CUDA_SUCCESS) {
        free(block);
        free(link);
    }
    return result;
}

/* Lock held. */
static void bind(struct vgpu_link *object, struct vgpu_link *memory, CUdevice device, uint64_t offset, uint64_t size,
                 struct vgpu_bound *bound) {
    *bound = (struct vgpu_bound){
        .next = object->block->bound, .block = memory->block, .device = device, .offset = offset, .size = size};
    object->block->bound = bound;
    memory->block->references++;
}

/* The two forms of each call: with a device (CUDA 13.1), which can only be the memory's device, and without. */
typedef CUresult (*bind_handle)(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                                unsigned long long);
typedef CUresult (*bind_handle_of)(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t,
                                   size_t, unsigned long long);
typedef CUresult (*bind_address)(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
typedef CUresult (*bind_address_of)(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t,
                                    unsigned long long);

static CUresult bind_memory(bind_handle plain, bind_handle_of with_device, CUmemGenericAllocationHandle object,
                            CUdevice device, size_t offset, CUmemGenericAllocationHandle memory, size_t start,
                            size_t size, unsigned long long flags) {
    struct vgpu_bound *bound = calloc(1, sizeof *bound);
    vgpu_blocks_lock();
    struct vgpu_link *to = vgpu_block_handle(object), *what = vgpu_block_handle(memory);
    bool counted = to && what;
    struct vgpu_payment payment = {0};
    bool may = !counted || (bound && vgpu_block_pay(what->block, start, size, &payment));
    CUresult result = !may    ? CUDA_ERROR_OUT_OF_MEMORY
                      : plain ? plain(object, offset, memory, start, size, flags)
                              : with_device(object, device, offset, memory, start, size, flags);
    if (counted && may)
        vgpu_block_paid(what->block, &payment, result);
    if (result == CUDA_SUCCESS && counted) {
        bind(to, what, what->block->device, offset, size, bound);
        bound = NULL;
    }
    vgpu_blocks_unlock();
    free(bound);
    return result;
}

static CUresult bind_mapped(bind_address plain, bind_address_of with_device, CUmemGenericAllocationHandle object,
                            CUdevice device, size_t offset, CUdeviceptr address, size_t size,
                            unsigned long long flags) {
    if (!vgpu_tier_show(address)) {
        vgpu_log(VGPU_LOG_ERROR, "the block at %#llx cannot be bound to a multicast object: it lies in host memory",
                 (unsigned long long)address);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct vgpu_bound *bound = calloc(1, sizeof *bound);
    vgpu_blocks_lock();
    struct vgpu_link *to = vgpu_block_handle(object), *what = vgpu_block_around(address);
    bool counted = to && what;
    CUresult result = counted && !bound ? CUDA_ERROR_OUT_OF_MEMORY
                      : plain           ? plain(object, offset, address, size, flags)
                                        : with_device(object, device, offset, address, size, flags);
    if (result == CUDA_SUCCESS && counted) {
        bind(to, what, what->block->device, offset, size, bound);
        bound = NULL;
    }
    vgpu_blocks_unlock();
    free(bound);
    return result;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory,
                            size_t start, size_t size, unsigned long long flags) {
    CUDA_REAL(cuMulticastBindMem);
    return bind_memory(real, NULL, object, 0, offset, memory, start, size, flags);
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
                               CUmemGenericAllocationHandle memory, size_t start, size_t size,
                               unsigned long long flags) {
    CUDA_REAL(cuMulticastBindMem_v2);
    return bind_memory(NULL, real, object, device, offset, memory, start, size, flags);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size,
                             unsigned long long flags) {
    CUDA_REAL(cuMulticastBindAddr);
    return bind_mapped(real, NULL, object, 0, offset, address, size, flags);
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
                                CUdeviceptr address, size_t size, unsigned long long flags) {
    CUDA_REAL(cuMulticastBindAddr_v2);
    return bind_mapped(NULL, real, object, device, offset, address, size, flags);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t size) {
    CUDA_REAL(cuMulticastUnbind);
    vgpu_blocks_lock();
    CUresult result = real(object, device, offset, size);
    struct vgpu_link *link = result == CUDA_SUCCESS ? vgpu_block_handle(object) : NULL;
    for (struct vgpu_bound **at = link ? &link->block->bound : NULL; at && *at;) {
        struct vgpu_bound *bound = *at;
        if (bound->device == device && bound->offset >= offset && bound->offset + bound->size <= offset + size) {
            *at = bound->next;
            vgpu_block_drop(bound->block);
            free(bound);
        } else {
            at = &bound->next;
        }
    }
    vgpu_blocks_unlock();
    return result;
}
