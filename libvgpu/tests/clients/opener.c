/* A library that is opened with RTLD_LOCAL and finds the driver through handles of its own, as NCCL does from Python.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>

typedef CUresult (*allocate_function)(CUdeviceptr *, size_t);

/* Allocates through dlsym on a handle of libcuda; 1000: not found. */
int through_handle(CUdeviceptr *pointer, size_t bytes) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    allocate_function allocate = handle ? (allocate_function)dlsym(handle, "cuMemAlloc_v2") : NULL;
    return allocate ? (int)allocate(pointer, bytes) : 1000;
}

/* Allocates through what the own scope has: this library is linked with libcuda. */
int through_next(CUdeviceptr *pointer, size_t bytes) {
    allocate_function allocate = (allocate_function)dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    return allocate ? (int)allocate(pointer, bytes) : 1000;
}

int through_link(CUdeviceptr *pointer, size_t bytes) {
    return (int)cuMemAlloc(pointer, bytes);
}
