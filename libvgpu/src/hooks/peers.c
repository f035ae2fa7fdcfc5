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
static void open_blocks(CUdevice device) {
    vgpu_tier_lock();
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE; number = vgpu_tier_next(number + 1)) {
        const struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (record->device == device && record->on_device && !record->pinned)
            vgpu_tier_give_access(device, true, record->base, record->bytes);
    }
    vgpu_tier_unlock();
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    CUDA_REAL(cuCtxEnablePeerAccess);
    const CUresult result = real(peer, flags);
    CUdevice device, here;
    if (result != CUDA_SUCCESS || vgpu_tier_mode() == VGPU_TIER_OFF || !device_of(peer, &device) || !DRIVER(cuCtxGetDevice) ||
        DRIVER(cuCtxGetDevice)(&here) != CUDA_SUCCESS || here == device)
        return result;
    vgpu_tier_add_peer(device, here);
    open_blocks(device);
    return result;
}
