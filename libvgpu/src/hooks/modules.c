/* Unloaded functions: their handles may come back for other functions with other costs. The functions of a module are
 * unknown here, so all are doubted. */
#define _GNU_SOURCE
#include "pacer/pacer.h"
#include "tier/parameters.h"

/* Parameters become stale twice. Before the driver's call, because a handle may come back before the call returns. And
 * after it, because of answers that were read meanwhile. */
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
