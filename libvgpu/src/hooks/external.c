/* Memory of another interface (Vulkan, a video encoder) that comes from outside. It lies on the card, so whoever imports it pays for it, from
 * the import until the object is destroyed. */
#define _GNU_SOURCE
#include "charge.h"

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    CUDA_REAL(cuImportExternalMemory);
    struct vgpu_attempt attempt = vgpu_attempt_here(memory && description ? description->size : 0);
    if (attempt.verdict == VGPU_REFUSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(memory, description);
    uint64_t handle = result == CUDA_SUCCESS && memory ? (uint64_t)(uintptr_t)*memory : 0;
    if (vgpu_attempt_booked(&attempt, result, VGPU_EXTERNAL, handle, attempt.bytes, VGPU_KIND_BUFFER))
        return result;
    if (DRIVER(cuDestroyExternalMemory))
        DRIVER(cuDestroyExternalMemory)(*memory);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    CUDA_REAL(cuDestroyExternalMemory);
    struct vgpu_holding holding;
    uint64_t handle = (uint64_t)(uintptr_t)memory;
    bool known = vgpu_taken(VGPU_EXTERNAL, handle, &holding);
    return vgpu_freed(real(memory), VGPU_EXTERNAL, handle, known, &holding);
}
