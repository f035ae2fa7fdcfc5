/* Access of one card to another one's memory: what the tier has mapped does not get it by itself, as the driver's own memory does. */
#define _GNU_SOURCE
#include "charge.h"
#include "tier.h"
#include "tier_memory.h"

static bool device_of(CUcontext context, CUdevice *device) {
    bool pushed;
    const bool known = vgpu_tier_enter_context(context, &pushed) && DRIVER(cuCtxGetDevice) && DRIVER(cuCtxGetDevice)(device) == CUDA_SUCCESS;
    vgpu_tier_leave_context(pushed);
    return known;
}

/* Blocks of the device that are there already; those that come, or come back, get it when they are mapped. */
static CUresult open_blocks(CUdevice device) {
    CUresult result = CUDA_SUCCESS;
    vgpu_tier_lock();
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE && result == CUDA_SUCCESS; number = vgpu_tier_next(number + 1)) {
        const struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (record->device == device && record->on_device && !record->pinned)
            result = vgpu_tier_give_access(device, true, record->base, record->bytes);
    }
    vgpu_tier_unlock();
    return result;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    CUDA_REAL(cuCtxEnablePeerAccess);
    CUresult result = real(peer, flags);
    CUdevice device, here;
    if (result != CUDA_SUCCESS || vgpu_tier_mode() == VGPU_TIER_OFF || !device_of(peer, &device) || !DRIVER(cuCtxGetDevice) ||
        DRIVER(cuCtxGetDevice)(&here) != CUDA_SUCCESS || here == device)
        return result;
    vgpu_tier_add_peer(device, here);
    result = open_blocks(device);
    if (result != CUDA_SUCCESS && DRIVER(cuCtxDisablePeerAccess))
        DRIVER(cuCtxDisablePeerAccess)(peer); /* with some blocks out of reach it would be half of an answer */
    return result;
}
