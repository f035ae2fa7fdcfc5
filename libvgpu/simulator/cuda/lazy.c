/* When the code of functions is loaded; loading takes time on the host. Code is loaded with the module, or when a
 * function is first needed: cuda.h (cuModuleGetLoadingMode, cuLibraryLoadData, cuFuncIsLoaded) and the programming
 * guide's "Lazy loading". */
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

bool loading_lazy(void) {
    const char *mode = getenv("CUDA_MODULE_LOADING");
    int version = sim_driver()->cuda;
    if (mode && strcmp(mode, "EAGER") == 0)
        return false;
    if (mode && strcmp(mode, "LAZY") == 0)
        return version >= 11070;
    return version >= 12020; /* the default on Linux since then */
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    ENTER();
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = loading_lazy() ? CU_MODULE_LAZY_LOADING : CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

void function_load(CUfunction function) {
    /* one load at a time; a thread that needs the same function waits for it */
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    if (atomic_load_explicit(&function->loaded, memory_order_acquire))
        return;
    pthread_mutex_lock(&loading);
    if (!function->loaded) {
        CUcontext context = function->module->context;
        if (strict_about("load-waits")) /* the guide: loading may require the context to be synchronized */
            sim_wait(&driver.sim, context->card, context->last);
        if (driver.sim.timing.load_ns)
            sim_sleep_until(sim_now() + driver.sim.timing.load_ns);
        atomic_store_explicit(&function->loaded, true, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
}

static CUresult function_check(CUfunction function) {
    ENTER();
    return object_is(function, OBJECT_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function) {
    INJECT();
    CUresult result = function_check(function);
    if (result || !state)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *state = function->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function) {
    INJECT();
    CUresult result = function_check(function);
    if (!result)
        function_load(function);
    return result;
}
