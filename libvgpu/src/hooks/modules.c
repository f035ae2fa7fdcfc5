/* Functions that go: their handles may come back for other functions, whose cost is another. Which ones belonged to a module is not known. */
#define _GNU_SOURCE
#include "pacer.h"
#include "parameters.h"

static CUresult gone(CUresult result) {
    if (result == CUDA_SUCCESS)
        vgpu_pacer_stale(0);
    vgpu_parameters_stale();
    return result;
}

CUresult cuModuleUnload(CUmodule module) {
    CUDA_REAL(cuModuleUnload);
    return gone(real(module));
}

CUresult cuLibraryUnload(CUlibrary library) {
    CUDA_REAL(cuLibraryUnload);
    return gone(real(library));
}
