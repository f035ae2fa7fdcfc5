/* A library that is linked with the driver, or looks it up, and takes as much of the first card as it can get. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);

static void grab_by(int (*init)(unsigned), int (*create)(void **, unsigned, int),
                    int (*allocate)(unsigned long long *, size_t)) {
    void *context;
    unsigned long long pointer;
    init(0);
    create(&context, 0, 0);
    for (size_t size = 1ul << 34; size;)
        if (allocate(&pointer, size) != 0)
            size /= 2;
}

void grab(void) {
    grab_by(cuInit, cuCtxCreate_v2, cuMemAlloc_v2);
}

void look_up_and_grab(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    grab_by((int (*)(unsigned))dlsym(driver, "cuInit"),
            (int (*)(void **, unsigned, int))dlsym(driver, "cuCtxCreate_v2"),
            (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2"));
}

__attribute__((constructor)) static void at_load(void) {
    if (getenv("GRAB_AT_LOAD"))
        grab();
}
