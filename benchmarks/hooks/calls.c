/* Mean cost of driver calls in ns, one line each: "<name> <ns>". Linked with libcuda; run with and without the preloaded library. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 20000
#define REPEATS 9

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void check(CUresult result, const char *what) {
    if (result) {
        fprintf(stderr, "%s: driver error %d\n", what, result);
        exit(1);
    }
}

static CUfunction kernel;

static void alloc_and_free(int rounds) {
    CUdeviceptr pointer;
    for (int i = 0; i < rounds; i++) {
        check(cuMemAlloc(&pointer, 4096), "cuMemAlloc");
        check(cuMemFree(pointer), "cuMemFree");
    }
}

static void info(int rounds) {
    size_t left, total;
    for (int i = 0; i < rounds; i++)
        check(cuMemGetInfo(&left, &total), "cuMemGetInfo");
}

static void launch(int rounds) {
    for (int i = 0; i < rounds; i++) {
        check(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        if (i % 512 == 511)
            check(cuCtxSynchronize(), "cuCtxSynchronize");
    }
    check(cuCtxSynchronize(), "cuCtxSynchronize");
}

/* The fastest of several runs: what other processes on the machine do only ever adds. */
static void measure(const char *name, void (*work)(int), int rounds) {
    double best = 1e18;
    work(rounds / 10);
    for (int i = 0; i < REPEATS; i++) {
        double begun = now();
        work(rounds);
        double each = (now() - begun) / rounds;
        best = each < best ? each : best;
    }
    printf("%s %.1f\n", name, best);
}

int main(void) {
    static const char text[] = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry spin_100ns()\n{ ret; }\n";
    static CUdeviceptr live[10000];
    CUcontext context;
    CUmodule module;
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuModuleLoadData(&module, text), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, "spin_100ns"), "cuModuleGetFunction");
    measure("alloc+free", alloc_and_free, ROUNDS);
    for (int i = 0; i < 10000; i++)
        check(cuMemAlloc(&live[i], 4096), "cuMemAlloc");
    measure("alloc+free-10000-live", alloc_and_free, ROUNDS);
    measure("getinfo", info, ROUNDS);
    measure("launch", launch, ROUNDS);
    return 0;
}
