/* Access of one card to another card's memory. The driver's own memory becomes accessible automatically; memory mapped
 * by the tier does not, so these hooks grant it. */
#define _GNU_SOURCE
#include "ledger/charge.h"
#include "reserves/capture.h"
#include "reserves/pools.h"
#include "tier/memory.h"
#include "tier/tier.h"

static bool device_of(CUcontext context, CUdevice *device) {
    bool pushed;
    const bool known = vgpu_tier_enter_context(context, &pushed) && DRIVER(cuCtxGetDevice) &&
                       DRIVER(cuCtxGetDevice)(device) == CUDA_SUCCESS;
    vgpu_tier_leave_context(pushed);
    return known;
}

/* Grants access to the device's existing blocks. New blocks, and blocks that move back, get it when they are mapped. */
static CUresult open_blocks(CUdevice device) {
    CUresult result = CUDA_SUCCESS;
    if (!vgpu_tier_any())
        return result;
    const CUstreamCaptureMode mode = vgpu_relax();
    vgpu_tier_lock();
    for (uint32_t number = vgpu_tier_next(0); number != VGPU_TIER_NONE && result == CUDA_SUCCESS;
         number = vgpu_tier_next(number + 1)) {
        const struct vgpu_tier_record *record = vgpu_tier_record(number);
        if (record->device == device && record->on_device && !record->pinned)
            result = vgpu_tier_give_access(device, true, record->base, record->bytes);
    }
    vgpu_tier_unlock();
    vgpu_restore(mode);
    return result;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    CUDA_REAL(cuCtxEnablePeerAccess);
    CUresult result = real(peer, flags);
    CUdevice device, here;
    if (result != CUDA_SUCCESS || vgpu_tier_mode() == VGPU_TIER_OFF || !device_of(peer, &device) ||
        !DRIVER(cuCtxGetDevice) || DRIVER(cuCtxGetDevice)(&here) != CUDA_SUCCESS || here == device)
        return result;
    vgpu_tier_add_peer(device, here);
    result = open_blocks(device);
    if (result != CUDA_SUCCESS && DRIVER(cuCtxDisablePeerAccess))
        DRIVER(cuCtxDisablePeerAccess)(peer); /* access to only some blocks would be half a success */
    return result;
}

/* A block of the tier may replace a pool allocation, and the program treats it as the pool's. Access that the program
 * removes stays: nothing depends on a failing access. */
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count) {
    CUDA_REAL(cuMemPoolSetAccess);
    const CUresult result = real(pool, map, count);
    if (result != CUDA_SUCCESS || vgpu_tier_mode() == VGPU_TIER_OFF)
        return result;
    const CUdevice device = vgpu_pool_device(pool);
    bool any = false;
    for (size_t i = 0; i < count && device != VGPU_NO_DEVICE; i++) {
        const CUmemLocation *other = &map[i].location;
        if (other->type != CU_MEM_LOCATION_TYPE_DEVICE || other->id == device ||
            !(map[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ))
            continue;
        vgpu_tier_add_peer(device, other->id);
        any = true;
    }
    /* the program may try again after a failure: the driver accepts the same call twice */
    return any ? open_blocks(device) : result;
}
