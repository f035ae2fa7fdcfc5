/* A third library, preloaded behind ours, that stands in front of cuMemAlloc_v2 itself and finds the next one by
 * RTLD_NEXT. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>

unsigned wrapped_calls;

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    CUresult (*next)(CUdeviceptr *, size_t) = (CUresult (*)(CUdeviceptr *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    if (!next || next == cuMemAlloc_v2 || next != (void *)dlsym(RTLD_NEXT, "cuMemAlloc_v2"))
        abort();
    wrapped_calls++;
    return next(pointer, bytes);
}

/* A name that begins like the driver's and belongs to another library. */
int cudnnCreate(void **handle) {
    *handle = NULL;
    return 77;
}
