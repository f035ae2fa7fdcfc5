/* A library that is opened with RTLD_LOCAL and looks the driver's functions up in itself, as a runtime does that is
 * linked with what it probes. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>

typedef CUresult (*create_function)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                                    unsigned long long);

/* 1000: not found. */
int create_by_own_handle(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties) {
    Dl_info info;
    void *own = dladdr((void *)create_by_own_handle, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    create_function create = own ? (create_function)dlsym(own, "cuMemCreate") : NULL;
    return create ? (int)create(handle, bytes, properties, 0) : 1000;
}
