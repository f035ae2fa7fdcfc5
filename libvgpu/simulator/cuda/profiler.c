/* Profiler control (cudaProfiler.h): there is no profiler, so nothing starts or stops. */
#include "cuda/driver.h"

/* NVIDIA's driver API reference, "Profiler Control [DEPRECATED]": config and output are file names. */
CUresult cuProfilerInitialize(const char *config, const char *output, int mode) {
    ENTER();
    return !config || !output || mode < 0 || mode > 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuProfilerStart(void) {
    ENTER_CONTEXT(context);
    (void)context;
    return CUDA_SUCCESS;
}

CUresult cuProfilerStop(void) {
    ENTER_CONTEXT(context);
    (void)context;
    return CUDA_SUCCESS;
}
