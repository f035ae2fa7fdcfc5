/* The memory that a card seems to have: the limit, and what the container has left of it. */
#define _GNU_SOURCE
#include "reserves/reported_memory.h"

#include "hooks/vmm.h"
#include "ledger/charge.h"
#include "tier/tier.h"

#define REAP_INTERVAL_MS 100 /* a killed process's memory soon shows as free, without cost for programs that poll */

static unsigned clamp32(uint64_t bytes) {
    return bytes > 0xffffffffu ? 0xffffffffu : (unsigned)bytes;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    CUDA_REAL(cuMemGetInfo_v2);
    CUresult result = real(free, total);
    struct vgpu_place place;
    if (result != CUDA_SUCCESS || vgpu_enforcement() == VGPU_UNLIMITED || !vgpu_place_now(&place))
        return result;
    vgpu_reap(REAP_INTERVAL_MS);
    vgpu_blocks_give_back();
    vgpu_tier_collect();
    struct vgpu_reported_memory view =
        vgpu_reported_memory_of(place.card, total ? *total : UINT64_MAX, free ? *free : UINT64_MAX);
    if (free)
        *free = view.free;
    if (total)
        *total = view.total;
    return result;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    CUDA_REAL(cuMemGetInfo);
    CUresult result = real(free, total);
    struct vgpu_place place;
    if (result != CUDA_SUCCESS || vgpu_enforcement() == VGPU_UNLIMITED || !vgpu_place_now(&place))
        return result;
    vgpu_reap(REAP_INTERVAL_MS);
    vgpu_blocks_give_back();
    vgpu_tier_collect();
    struct vgpu_reported_memory view =
        vgpu_reported_memory_of(place.card, total ? *total : UINT64_MAX, free ? *free : UINT64_MAX);
    if (free)
        *free = clamp32(view.free);
    if (total)
        *total = clamp32(view.total);
    return result;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUDA_REAL(cuDeviceTotalMem_v2);
    CUresult result = real(bytes, device);
    if (result == CUDA_SUCCESS && bytes && vgpu_enforcement() != VGPU_UNLIMITED)
        *bytes = vgpu_reported_memory_of(vgpu_card_of_device(device), *bytes, UINT64_MAX).total;
    return result;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    CUDA_REAL(cuDeviceTotalMem);
    CUresult result = real(bytes, device);
    if (result == CUDA_SUCCESS && bytes && vgpu_enforcement() != VGPU_UNLIMITED)
        *bytes = clamp32(vgpu_reported_memory_of(vgpu_card_of_device(device), *bytes, UINT64_MAX).total);
    return result;
}
