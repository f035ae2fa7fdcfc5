/* A plain C program that is linked with the driver: allocates argv[1] bytes, then one byte more, and prints both
 * answers and cuMemGetInfo. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments) {
    CUcontext context;
    CUdeviceptr first, second;
    size_t left = 0, total = 0;
    if (count != 2 || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 1;
    CUresult granted = cuMemAlloc(&first, strtoull(arguments[1], NULL, 10));
    CUresult refused = cuMemAlloc(&second, 1);
    if (cuMemGetInfo(&left, &total))
        return 1;
    printf("%d %d %zu %zu\n", granted, refused, left, total);
    return 0;
}
