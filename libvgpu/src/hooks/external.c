/* Memory imported from another interface (Vulkan, a video encoder). It lies on the card, so the importing process pays
 * for it. It pays from the import until the object and all its mappings are gone, because the driver keeps the memory
 * as long. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "ledger/charge.h"

static uint64_t number(CUexternalMemory memory) {
    return (uint64_t)(uintptr_t)memory;
}

/* As in all charging hooks: reads the program's arguments once, because another thread may write them, and books the
 * driver's answer before the program can see it. */
CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *given) {
    CUDA_REAL(cuImportExternalMemory);
    if (!memory || !given)
        return real(memory, given);
    const CUDA_EXTERNAL_MEMORY_HANDLE_DESC description = *given;
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, description.size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUexternalMemory made = NULL;
    CUresult result = real(&made, &description);
    if (attempt.verdict == VGPU_CHARGED) {
        struct vgpu_share *share = result == CUDA_SUCCESS ? malloc(sizeof *share) : NULL;
        bool held = false;
        if (!share) {
            vgpu_uncharge(attempt.ticket, attempt.bytes);
        } else {
            *share = (struct vgpu_share){.handles = 1, .bytes = attempt.bytes, .ticket = attempt.ticket};
            struct vgpu_holding holding = {.share = share, .owner = attempt.place.context, .payer = VGPU_PAID_BY_SHARE};
            held = vgpu_hold(VGPU_EXTERNAL, number(made), &holding);
        }
        if (result == CUDA_SUCCESS && !held) {
            if (DRIVER(cuDestroyExternalMemory))
                DRIVER(cuDestroyExternalMemory)(made);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (result == CUDA_SUCCESS)
        *memory = made;
    return result;
}

/* Books a mapping as one more handle of the object. The driver may return the same address for overlapping ranges: then
 * they are one handle. */
static bool mapped(bool known, CUresult result, enum vgpu_space space, uint64_t handle,
                   const struct vgpu_holding *holding) {
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

/* Joins before the driver's call, so that no other thread's destruction ends the charge in between. The mapping belongs
 * to the current context, which may differ from that of the import. */
static bool joined(CUexternalMemory memory, struct vgpu_holding *holding) {
    struct vgpu_place place;
    vgpu_own_tables();
    if (!memory || !vgpu_sizes_any() || !vgpu_sizes_join(VGPU_EXTERNAL, number(memory), holding))
        return false;
    if (vgpu_place_now(&place))
        holding->owner = place.context;
    return true;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *buffer) {
    CUDA_REAL(cuExternalMemoryGetMappedBuffer);
    struct vgpu_holding holding;
    CUdeviceptr made = 0;
    bool known = joined(memory, &holding);
    CUresult result = real(pointer ? &made : NULL, memory, buffer);
    if (!mapped(known, result, VGPU_POINTER, made, &holding)) {
        if (DRIVER(cuMemFree_v2))
            DRIVER(cuMemFree_v2)(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *pointer = made;
    return result;
}

CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *array, CUexternalMemory memory,
                                                 const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *description) {
    CUDA_REAL(cuExternalMemoryGetMappedMipmappedArray);
    struct vgpu_holding holding;
    CUmipmappedArray made = NULL;
    bool known = joined(memory, &holding);
    CUresult result = real(array ? &made : NULL, memory, description);
    if (!mapped(known, result, VGPU_MIPMAP, (uint64_t)(uintptr_t)made, &holding)) {
        if (DRIVER(cuMipmappedArrayDestroy))
            DRIVER(cuMipmappedArrayDestroy)(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *array = made;
    return result;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    CUDA_REAL(cuDestroyExternalMemory);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_EXTERNAL, number(memory), &freeing);
    return vgpu_freed(real(memory), VGPU_EXTERNAL, number(memory), known, &freeing);
}
