/* MPS as a client sees it. VGPU_SIM_MPS=1: a control daemon exists. It only limits how many whole multiprocessors a
 * client may use. The time of kernels does not depend on it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

static bool set(const char *variable) {
    const char *value = secure_getenv(variable);
    return value && strcmp(value, "1") == 0;
}

bool mps_enabled(void) {
    return set("VGPU_SIM_MPS");
}

unsigned mps_multiprocessors(void) {
    const unsigned all = (unsigned)driver.sim.profile->multiprocessors;
    const char *value = secure_getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    const double percent = value ? strtod(value, NULL) : 100;
    if (!mps_enabled() || !(percent > 0 && percent < 100))
        return all;
    const double part = all * percent / 100;
    const unsigned whole = (unsigned)part;
    return whole < part ? whole + 1 : whole;
}

unsigned mps_reported_multiprocessors(void) {
    return set("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING")
               ? (unsigned)driver.sim.profile->multiprocessors
               : mps_multiprocessors();
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam *affinity, CUexecAffinityType type) {
    ENTER_CONTEXT(context);
    (void)context;
    if (!affinity || type != CU_EXEC_AFFINITY_TYPE_SM_COUNT)
        return CUDA_ERROR_INVALID_VALUE;
    if (!mps_enabled())
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    affinity->type = type;
    affinity->param.smCount.val = mps_multiprocessors();
    return CUDA_SUCCESS;
}
