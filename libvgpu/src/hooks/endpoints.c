/* Logical endpoints (CUDA 13.3): memory bound to an endpoint stays on its card, even after every other reference is
 * gone. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "base/log.h"
#include "hooks/endpoints.h"
#include "hooks/vmm.h"
#include "tier/blocks.h"

/* Protected by the lock of blocks. */
static struct endpoint {
    struct endpoint *next;
    CUlogicalEndpointId id;
    struct vgpu_bound bound; /* one binding; its `next` is not used */
} *endpoints;

void vgpu_endpoints_forget(void) {
    endpoints = NULL;
}

/* Lock of blocks held. Releases what is bound within a range of a device, or (VGPU_NO_DEVICE) everything. */
static void let_go(CUlogicalEndpointId id, CUdevice device, uint64_t offset, uint64_t size) {
    for (struct endpoint **at = &endpoints; *at;) {
        struct endpoint *endpoint = *at;
        const struct vgpu_bound *bound = &endpoint->bound;
        bool within = device == VGPU_NO_DEVICE || (bound->device == device && bound->offset >= offset &&
                                                   bound->size <= size && bound->offset - offset <= size - bound->size);
        if (endpoint->id != id || !within) {
            at = &endpoint->next;
            continue;
        }
        *at = endpoint->next;
        vgpu_block_drop(bound->block);
        free(endpoint);
    }
}

/* Lock of blocks held. Books a binding that the driver has made; frees the record if it was not needed. */
static void book(struct endpoint *fresh, CUresult result, CUlogicalEndpointId id, struct vgpu_link *memory,
                 CUdevice device, uint64_t offset, uint64_t size) {
    if (result != CUDA_SUCCESS || !memory) {
        free(fresh);
        return;
    }
    *fresh =
        (struct endpoint){endpoints, id, {.block = memory->block, .device = device, .offset = offset, .size = size}};
    endpoints = fresh;
    memory->block->references++;
}

CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset,
                                  CUmemGenericAllocationHandle handle, cuuint64_t start, cuuint64_t size,
                                  unsigned long long flags) {
    CUDA_REAL(cuLogicalEndpointBindMem);
    struct endpoint *fresh = calloc(1, sizeof *fresh);
    vgpu_blocks_lock();
    struct vgpu_link *memory = vgpu_block_handle(handle);
    struct vgpu_payment payment = {0};
    bool may = !memory || (fresh && vgpu_block_pay(memory->block, start, size, &payment));
    CUresult result = may ? real(id, device, offset, handle, start, size, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (memory && may)
        vgpu_block_paid(memory->block, &payment, result);
    book(fresh, result, id, memory, device, offset, size);
    vgpu_blocks_unlock();
    return result;
}

CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, void *address,
                                   cuuint64_t size, unsigned long long flags) {
    CUDA_REAL(cuLogicalEndpointBindAddr);
    if (!vgpu_tier_show((CUdeviceptr)(uintptr_t)address)) {
        vgpu_log(VGPU_LOG_ERROR, "no endpoint is bound at %p: the block lies in host memory", address);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct endpoint *fresh = calloc(1, sizeof *fresh);
    vgpu_blocks_lock();
    struct vgpu_link *memory = vgpu_block_around((uint64_t)(uintptr_t)address);
    CUresult result = memory && !fresh ? CUDA_ERROR_OUT_OF_MEMORY : real(id, device, offset, address, size, flags);
    book(fresh, result, id, memory, device, offset, size);
    vgpu_blocks_unlock();
    return result;
}

CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, cuuint64_t size) {
    CUDA_REAL(cuLogicalEndpointUnbind);
    vgpu_blocks_lock();
    CUresult result = real(id, device, offset, size);
    if (result == CUDA_SUCCESS)
        let_go(id, device, offset, size);
    vgpu_blocks_unlock();
    return result;
}

CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId id) {
    CUDA_REAL(cuLogicalEndpointDestroy);
    vgpu_blocks_lock();
    CUresult result = real(id);
    if (result == CUDA_SUCCESS)
        let_go(id, VGPU_NO_DEVICE, 0, 0);
    vgpu_blocks_unlock();
    return result;
}
