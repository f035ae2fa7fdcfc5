/* Functions that go: their handles may come back for other functions, whose cost is another. Which ones belonged to a
 * module is not known. */
#define _GNU_SOURCE
#include "pacer/pacer.h"
#include "tier/parameters.h"

/* Parameters are stale before the driver is called, as a handle may come back before it has returned, and after, for
 * what was asked meanwhile. */
static CUresult gone(CUresult result) {
    if (result == CUDA_SUCCESS)
        vgpu_pacer_stale(0);
    vgpu_parameters_stale();
    return result;
}

CUresult cuModuleUnload(CUmodule module) {
    CUDA_REAL(cuModuleUnload);
    vgpu_parameters_stale();
    return gone(real(module));
}

CUresult cuLibraryUnload(CUlibrary library) {
    CUDA_REAL(cuLibraryUnload);
    vgpu_parameters_stale();
    return gone(real(library));
}
