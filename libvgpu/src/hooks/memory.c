/* Device memory that is allocated immediately (linear, pitched, managed), and the free of any pointer. */
#define _GNU_SOURCE
#include "ledger/charge.h"
#include "tier/tier.h"

/* no known driver pads rows further (texture pitch alignment); the real size is charged afterwards */
#define PITCH_STEP 512u

/* Large blocks may go to host memory; vgpu_tier_allocate decides their place. Tested only for blocks whose allocation
 * takes far longer. */
static inline bool tiered(const void *out, uint64_t bytes) {
    return __builtin_expect(vgpu_tier_is_large(bytes), 0) && out && vgpu_tier_mode() != VGPU_TIER_OFF;
}

/* Puts a small block without room on the card into host memory, which is better than an error. Logs the refusal if that
 * fails, too. */
static __attribute__((noinline)) CUresult elsewhere(const struct vgpu_attempt *attempt, CUdeviceptr *pointer) {
    const CUresult result = vgpu_tier_on_host(pointer, attempt->bytes, &attempt->place);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && attempt->verdict == VGPU_REFUSED)
        vgpu_tell_refused(attempt->place.card, attempt->bytes);
    return result;
}

/* The driver's answer goes into a variable of the hook before booking. Another thread may write the program's own
 * variable, and so cause a wrong address or size to be booked. Or it may read the pointer there and free it before it
 * is booked. */
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
    if (tiered(pointer, bytes))
        return vgpu_tier_allocate(pointer, bytes);
    if (!vgpu_attempt_quietly(&attempt, pointer ? bytes : 0))
        return elsewhere(&attempt, pointer);
    if (__builtin_expect(attempt.verdict == VGPU_UNCHARGED, 0))
        return real(pointer, bytes);
    CUdeviceptr made = 0;
    CUresult result = real(&made, bytes);
    result = booked(&attempt, result, made, bytes);
    if (result == CUDA_SUCCESS)
        *pointer = made;
    else if (result == CUDA_ERROR_OUT_OF_MEMORY)
        result = elsewhere(&attempt, pointer);
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

/* Upper bound of a pitched allocation: rows padded to PITCH_STEP. 0: more than 64 bits, which no driver grants. */
static uint64_t pitch_bound(uint64_t width, uint64_t height) {
    uint64_t padded, bytes;
    bool fits = !__builtin_add_overflow(width, PITCH_STEP - 1, &padded) &&
                !__builtin_mul_overflow(padded & ~(uint64_t)(PITCH_STEP - 1), height, &bytes);
    return fits ? bytes : 0;
}

/* Element sizes that drivers accept (cuda.h, cuMemAllocPitch). */
static bool is_element(unsigned bytes) {
    return bytes == 4 || bytes == 8 || bytes == 16;
}

static CUresult tiered_pitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height) {
    CUdeviceptr made = 0;
    const CUresult result = vgpu_tier_allocate(&made, pitch_bound(width, height));
    if (result == CUDA_SUCCESS) {
        *pointer = made;
        *pitch = pitch_bound(width, 1);
    }
    return result;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    CUDA_REAL(cuMemAllocPitch_v2);
    struct vgpu_attempt attempt;
    if (tiered(pointer && pitch ? pointer : NULL, pitch_bound(width, height)) && is_element(element))
        return tiered_pitch(pointer, pitch, width, height);
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

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element) {
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

/* A pointer that is unknown here (imported, mapped, older) is only the driver's. */
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    CUDA_REAL(cuMemFree_v2);
    struct vgpu_freeing freeing;
    CUresult ours;
    if (vgpu_tier_maybe(pointer) && vgpu_tier_free(pointer, &ours))
        return ours;
    bool known = vgpu_freeing(VGPU_POINTER, pointer, &freeing);
    return vgpu_freed(real(pointer), VGPU_POINTER, pointer, known, &freeing);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    CUDA_REAL(cuMemFree);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_POINTER, pointer, &freeing);
    return vgpu_freed(real(pointer), VGPU_POINTER, pointer, known, &freeing);
}
