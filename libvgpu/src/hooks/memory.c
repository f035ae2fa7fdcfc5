/* Device memory that is allocated at once: linear, pitched, managed; and the free of any pointer. */
#define _GNU_SOURCE
#include "charge.h"

#define PITCH_STEP 512u /* no driver seen pads rows further (texture pitch alignment); what it really chose is settled afterwards */

/* What the driver answers goes into a variable of the hook's before it is booked: the program's own may be written by another of its threads, which
 * would book it under another address or size, or be seen there and freed before it is known here. */
static CUresult booked(struct vgpu_attempt *attempt, CUresult result, CUdeviceptr pointer, uint64_t chosen) {
    if (vgpu_attempt_booked(attempt, result, VGPU_POINTER, pointer, chosen, VGPU_KIND_BUFFER))
        return result;
    __typeof__(&cuMemFree_v2) release = DRIVER(cuMemFree_v2);
    if (release)
        release(pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    CUDA_REAL(cuMemAlloc_v2);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, pointer ? bytes : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, bytes);
    CUdeviceptr made = 0;
    CUresult result = real(&made, bytes);
    result = booked(&attempt, result, made, bytes);
    if (result == CUDA_SUCCESS)
        *pointer = made;
    return result;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    CUDA_REAL(cuMemAlloc);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, pointer ? bytes : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, bytes);
    CUdeviceptr_v1 made = 0;
    CUresult result = real(&made, bytes);
    result = booked(&attempt, result, made, bytes);
    if (result == CUDA_SUCCESS)
        *pointer = made;
    return result;
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    CUDA_REAL(cuMemAllocManaged);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, pointer ? bytes : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, bytes, flags);
    CUdeviceptr made = 0;
    CUresult result = real(&made, bytes, flags);
    result = booked(&attempt, result, made, bytes);
    if (result == CUDA_SUCCESS)
        *pointer = made;
    return result;
}

/* Upper bound of a pitched allocation: rows padded to PITCH_STEP; 0: more than 64 bits, which no driver will grant. */
static uint64_t pitch_bound(uint64_t width, uint64_t height) {
    uint64_t padded, bytes;
    bool fits = !__builtin_add_overflow(width, PITCH_STEP - 1, &padded) &&
                !__builtin_mul_overflow(padded & ~(uint64_t)(PITCH_STEP - 1), height, &bytes);
    return fits ? bytes : 0;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    CUDA_REAL(cuMemAllocPitch_v2);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, pointer && pitch ? pitch_bound(width, height) : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, pitch, width, height, element);
    CUdeviceptr made = 0;
    size_t step = 0;
    CUresult result = real(&made, &step, width, height, element);
    result = booked(&attempt, result, made, (uint64_t)step * height);
    if (result == CUDA_SUCCESS) {
        *pointer = made;
        *pitch = step;
    }
    return result;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element) {
    CUDA_REAL(cuMemAllocPitch);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, pointer && pitch ? pitch_bound(width, height) : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, pitch, width, height, element);
    CUdeviceptr_v1 made = 0;
    unsigned step = 0;
    CUresult result = real(&made, &step, width, height, element);
    result = booked(&attempt, result, made, (uint64_t)step * height);
    if (result == CUDA_SUCCESS) {
        *pointer = made;
        *pitch = step;
    }
    return result;
}

/* A pointer that is not known here (imported, mapped, from before) is the driver's alone. */
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    CUDA_REAL(cuMemFree_v2);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_POINTER, pointer, &freeing);
    return vgpu_freed(real(pointer), VGPU_POINTER, pointer, known, &freeing);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    CUDA_REAL(cuMemFree);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_POINTER, pointer, &freeing);
    return vgpu_freed(real(pointer), VGPU_POINTER, pointer, known, &freeing);
}
