/* Threads that launch on a stream of their own, copy, and move the blocks that their kernels touch to and from the
 * host, while managed memory comes and goes. No word may be lost, and no memory may be used that is not there.
 *
 * ROUNDS per thread. Prints "done"; or says what was wrong, and ends with 1. For the simulated driver alone. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "ok.h"

#define MIB (UINT64_C(1) << 20)
#define BLOCK (2 * MIB)
#define WORDS 512u
#define THREADS 4

static const char image[] =
    ".version 8.0\n.visible .entry touch_add_2us(.param .u64 to, .param .u64 words, .param .u64 value) { ret; }\n"
    ".visible .entry k_1us(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n";
static CUcontext context;
static CUfunction add, use;
static unsigned rounds;

static void launch(CUfunction function, CUstream stream, uint64_t a, uint64_t b, uint64_t c) {
    void *parameters[] = {&a, &b, &c};
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static void place(CUdeviceptr at, int node) {
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = node < 0 ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA}};
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle memory;
    OK(cuMemCreate(&memory, BLOCK, &properties, 0));
    OK(cuMemMap(at, BLOCK, 0, memory, 0));
    OK(cuMemSetAccess(at, BLOCK, &access, 1));
    OK(cuMemRelease(memory));
}

static void *work(void *number) {
    uint64_t mine = (uintptr_t)number, added = 0;
    CUdeviceptr block, aside, managed;
    CUstream stream;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, mine % 2 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
    OK(cuMemAddressReserve(&block, BLOCK, 0, 0, 0));
    OK(cuMemAlloc(&aside, BLOCK));
    OK(cuMemAllocManaged(&managed, 3 * BLOCK, CU_MEM_ATTACH_GLOBAL));
    place(block, -1);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t words[WORDS];
        for (unsigned i = 0; i < 3; i++) {
            launch(add, stream, block, WORDS, mine + round);
            launch(use, stream, managed + BLOCK * (i % 2), block, 0);
            added += mine + round;
        }
        OK(cuMemcpyDtoDAsync(aside, block, WORDS * 8, stream));
        OK(cuStreamSynchronize(stream));
        OK(cuMemUnmap(block, BLOCK));
        place(block, round % 2 ? -1 : 0);
        OK(cuMemcpyDtoDAsync(block, aside, WORDS * 8, stream));
        OK(cuMemcpyDtoHAsync(words, block, sizeof words, stream));
        OK(cuStreamSynchronize(stream));
        for (unsigned i = 0; i < WORDS; i++)
            if (words[i] != added) {
                printf("thread %d, round %u: word %u is %llu, not %llu\n", (int)mine, round, i,
                       (unsigned long long)words[i], (unsigned long long)added);
                fflush(stdout);
                _exit(1);
            }
        if (round % 8 == 7) {
            OK(cuMemFree(managed));
            OK(cuMemAllocManaged(&managed, 3 * BLOCK, CU_MEM_ATTACH_GLOBAL));
        }
    }
    OK(cuMemUnmap(block, BLOCK));
    OK(cuMemAddressFree(block, BLOCK));
    OK(cuMemFree(aside));
    OK(cuMemFree(managed));
    OK(cuStreamDestroy(stream));
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS];
    CUmodule module;
    CUdeviceptr rest;
    size_t left, all;
    rounds = count > 1 ? (unsigned)atoi(arguments[1]) : 100;
    setenv("VGPU_SIM_TIME", "bus=200GB/s,managed=migrate,fault=1us,kernels=4", 0);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&add, module, "touch_add_2us"));
    OK(cuModuleGetFunction(&use, module, "k_1us"));
    OK(cuMemGetInfo(&left, &all));
    OK(cuMemAlloc(&rest, left - (2 * THREADS + 2 * THREADS) * BLOCK)); /* all blocks, and some of the managed groups */
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)i) != 0)
            return 1;
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    OK(cuMemFree(rest));
    OK(cuCtxSynchronize());
    puts("done");
    return 0;
}
