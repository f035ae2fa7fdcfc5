/* Two threads free the same blocks at the same moment. Prints how many of these frees were granted, of how many blocks,
 * and what is used afterwards. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

#define BLOCKS 40000u

static CUcontext context;
static CUdeviceptr block;
static atomic_uint arrived, granted;

/* Waits for the other, so that both leave as closely together as they can. */
static void meet(unsigned count) {
    atomic_fetch_add(&arrived, 1);
    for (unsigned spins = 1; atomic_load(&arrived) < count; spins++)
        if (spins % 1000 == 0)
            sched_yield();
}

static void free_block(void) {
    granted += cuMemFree(block) == CUDA_SUCCESS;
}

static void *other(void *argument) {
    (void)argument;
    cuCtxSetCurrent(context);
    for (unsigned i = 0; i < BLOCKS; i++) {
        meet(4 * i + 2);
        free_block();
        meet(4 * i + 4);
    }
    return NULL;
}

int main(void) {
    pthread_t thread;
    size_t left = 0, total = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        pthread_create(&thread, NULL, other, NULL))
        return 1;
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (cuMemAlloc(&block, 1 << 10))
            return 2;
        meet(4 * i + 2); /* until the next meeting nobody allocates */
        free_block();
        meet(4 * i + 4);
    }
    pthread_join(thread, NULL);
    if (cuMemGetInfo(&left, &total))
        return 3;
    printf("%u of %u, %zu used\n", granted, BLOCKS, total - left);
    return 0;
}
