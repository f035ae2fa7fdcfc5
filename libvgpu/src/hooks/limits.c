/* Memory that the driver takes for a context because the program allows kernels more of it: the heap of malloc, the buffer of printf, and stacks. It is
 * charged when it is allowed, as the driver may take it at any launch from then on, by what it exceeds that of a new context. */
#define _GNU_SOURCE
#include "charge.h"
#include "fork.h"
#include "spin.h"

#define KIB UINT64_C(1024)

static vgpu_spin setting; /* held while the driver is asked: what was allowed last is what is charged */

void vgpu_context_limits_forget(void) {
    atomic_store(&setting, 0);
}

/* Stacks are those of all threads that the device can run at once. 0: not known, or more than 64 bits, which no driver will grant. */
static uint64_t threads_of(CUdevice device) {
    int processors = 0, threads = 0;
    __typeof__(&cuDeviceGetAttribute) ask = DRIVER(cuDeviceGetAttribute);
    if (!ask || ask(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        ask(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS || processors <= 0 || threads <= 0)
        return 0;
    return (uint64_t)processors * (uint64_t)threads;
}

/* Bytes by which a limit exceeds what each context has from the beginning (CUDA C++ Programming Guide: 1 KiB of stack, 1 MiB for printf, 8 MiB for
 * malloc). */
static uint64_t excess(CUlimit limit, uint64_t value, CUdevice device) {
    uint64_t usual = limit == CU_LIMIT_STACK_SIZE ? KIB : limit == CU_LIMIT_PRINTF_FIFO_SIZE ? KIB * KIB : 8 * KIB * KIB, bytes;
    if (value <= usual)
        return 0;
    return __builtin_mul_overflow(value - usual, limit == CU_LIMIT_STACK_SIZE ? threads_of(device) : 1, &bytes) ? 0 : bytes;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    CUDA_REAL(cuCtxSetLimit);
    struct vgpu_attempt attempt;
    struct vgpu_holding before;
    struct vgpu_place place;
    if ((limit != CU_LIMIT_STACK_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE && limit != CU_LIMIT_MALLOC_HEAP_SIZE) ||
        vgpu_enforcement() == VGPU_UNLIMITED || !vgpu_place_now(&place))
        return real(limit, value);
    const uint64_t key = (uint64_t)(uintptr_t)place.context + (uint64_t)limit; /* contexts lie further apart */
    vgpu_spin_lock(&setting);
    bool may = vgpu_attempt_here(&attempt, excess(limit, value, place.device));
    CUresult result = may ? real(limit, value) : CUDA_ERROR_OUT_OF_MEMORY;
    if (may && result == CUDA_SUCCESS && vgpu_sizes_any() && vgpu_sizes_take(VGPU_CONTEXT_LIMIT, key, &before))
        vgpu_let_go(&before);
    if (may && !vgpu_attempt_booked(&attempt, result, VGPU_CONTEXT_LIMIT, key, attempt.bytes, VGPU_KIND_CONTEXT))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    vgpu_spin_unlock(&setting);
    return result;
}
