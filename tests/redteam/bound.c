/* A library that is linked with the driver and takes as much of the first card as it can get. */
#include <stddef.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);

void grab(void) {
    void *context;
    unsigned long long pointer;
    cuInit(0);
    cuCtxCreate_v2(&context, 0, 0);
    for (size_t size = 1ul << 34; size;)
        if (cuMemAlloc_v2(&pointer, size) != 0)
            size /= 2;
}
