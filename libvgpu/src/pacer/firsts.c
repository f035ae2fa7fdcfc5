/* Paces launches whose GPU time is not known yet. */
#define _GNU_SOURCE
#include "pacer/firsts.h"

#include "base/clock.h"
#include "pacer/owed.h"
#include "pacer/samples.h"
#include "pacer/settle.h"
#include "reserves/capture.h"

#define FIRST_WAIT_NS 100000000u /* the longest wait */
#define STEP_NS 60000u           /* about the shortest time that a sleep takes */

void vgpu_first_sample_await(struct vgpu_cost *cost) {
    if (!atomic_load(&cost->flying) || atomic_exchange(&cost->waited, 1))
        return;
    uint64_t until = vgpu_now_ns() + FIRST_WAIT_NS;
    const uint32_t samples = atomic_load(&cost->samples);
    while (atomic_load(&cost->samples) == samples && atomic_load(&cost->flying) && vgpu_now_ns() < until) {
        if (vgpu_samples_collect(vgpu_settle_sample, false))
            vgpu_sleep_until(vgpu_now_ns() + STEP_NS);
    }
}

bool vgpu_unknown_await(unsigned card) {
    const uint64_t until = vgpu_now_ns() + FIRST_WAIT_NS;
    for (uint64_t now = vgpu_now_ns(); now < until; now = vgpu_now_ns()) {
        if (vgpu_unknown_begin(card, now))
            return true;
        if (vgpu_samples_collect(vgpu_settle_sample, false))
            vgpu_sleep_until(vgpu_now_ns() + STEP_NS);
    }
    return false;
}

/* cuLaunchKernel takes a kernel's handle as a function, too (cuda.h); cuFuncLoad does not. */
void vgpu_code_load(CUfunction function, CUcontext context) {
    CUcontext current = NULL;
    __typeof__(&cuFuncLoad) load = DRIVER(cuFuncLoad);
    if (!load || !function || vgpu_any_capture() || DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS ||
        current != context)
        return;
    if (load(function) == CUDA_ERROR_INVALID_HANDLE && DRIVER(cuKernelGetFunction) &&
        DRIVER(cuKernelGetFunction)(&function, (CUkernel)function) == CUDA_SUCCESS)
        load(function);
}
