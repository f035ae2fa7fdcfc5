/* Memory of another interface (Vulkan, a video encoder) that comes from outside. It lies on the card, so whoever imports it pays for it, from
 * the import until the object and everything that was mapped from it are gone: the driver keeps it as long. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "charge.h"

static uint64_t number(CUexternalMemory memory) {
    return (uint64_t)(uintptr_t)memory;
}

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    CUDA_REAL(cuImportExternalMemory);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, memory && description ? description->size : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(memory, description);
    if (attempt.verdict != VGPU_CHARGED)
        return result;
    struct vgpu_share *share = result == CUDA_SUCCESS ? malloc(sizeof *share) : NULL;
    if (!share) {
        vgpu_uncharge(attempt.ticket, attempt.bytes);
    } else {
        *share = (struct vgpu_share){.handles = 1, .bytes = attempt.bytes, .ticket = attempt.ticket};
        struct vgpu_holding holding = {.share = share, .owner = attempt.place.context, .payer = VGPU_PAID_BY_SHARE};
        if (vgpu_hold(VGPU_EXTERNAL, number(*memory), &holding))
            return result;
    }
    if (result == CUDA_SUCCESS && DRIVER(cuDestroyExternalMemory))
        DRIVER(cuDestroyExternalMemory)(*memory);
    return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

/* Books what was mapped as one more handle of the object. The driver may answer ranges that overlap by the same address: one handle then. */
static bool mapped(bool known, CUresult result, enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding) {
    struct vgpu_holding before;
    if (!known)
        return true;
    if (result != CUDA_SUCCESS) {
        vgpu_let_go(holding);
        return true;
    }
    if (vgpu_sizes_take(space, handle, &before))
        vgpu_let_go(&before);
    return vgpu_hold(space, handle, holding);
}

/* Joined before the driver is asked, so that no other thread's destruction ends the charge in between. What is mapped goes with the context that is
 * current, which need not be that of the import. */
static bool joined(CUexternalMemory memory, struct vgpu_holding *holding) {
    struct vgpu_place place;
    vgpu_own_tables();
    if (!memory || !vgpu_sizes_any() || !vgpu_sizes_join(VGPU_EXTERNAL, number(memory), holding))
        return false;
    if (vgpu_place_now(&place))
        holding->owner = place.context;
    return true;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *buffer) {
    CUDA_REAL(cuExternalMemoryGetMappedBuffer);
    struct vgpu_holding holding;
    bool known = joined(memory, &holding);
    CUresult result = real(pointer, memory, buffer);
    if (mapped(known, result, VGPU_POINTER, result == CUDA_SUCCESS ? *pointer : 0, &holding))
        return result;
    if (DRIVER(cuMemFree_v2))
        DRIVER(cuMemFree_v2)(*pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *array, CUexternalMemory memory,
                                                 const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *description) {
    CUDA_REAL(cuExternalMemoryGetMappedMipmappedArray);
    struct vgpu_holding holding;
    bool known = joined(memory, &holding);
    CUresult result = real(array, memory, description);
    if (mapped(known, result, VGPU_MIPMAP, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0, &holding))
        return result;
    if (DRIVER(cuMipmappedArrayDestroy))
        DRIVER(cuMipmappedArrayDestroy)(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    CUDA_REAL(cuDestroyExternalMemory);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_EXTERNAL, number(memory), &freeing);
    return vgpu_freed(real(memory), VGPU_EXTERNAL, number(memory), known, &freeing);
}
