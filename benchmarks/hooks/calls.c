/* Mean cost of driver calls in ns, one line each: "<name>\t<ns>\t<bar>\t<bar where memory moves>" (calls.py reads
 * them). Linked with libcuda; run with and without the preloaded library. A bar says how many ns the library may add:
 * it stands with its call, so that no call is without one. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 2000
#define REPEATS 150
#define MOST_NS 1e9 /* for all repeats: a real driver may take 100 us for what takes 0.1 us here */
#define QUICK_NS 2e7
#define LIVE 10000
#define LARGE (4u << 20)
#define LARGE_ONES 64
#define PACED 100
#define PACE_NS 100000.0
#define PROCESSES 16
#define CROWD_ROUNDS 400000

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void check(CUresult result, const char *what) {
    if (result) {
        fprintf(stderr, "%s: driver error %d\n", what, result);
        exit(1);
    }
}

static double most_ns = MOST_NS;
static CUfunction kernel, kernel_with_blocks;
static int mapped;            /* whether large blocks are the program's own mappings */
static CUdeviceptr blocks[4]; /* large enough for the tier, where there is one */

static void alloc_and_free(int rounds) {
    CUdeviceptr pointer;
    for (int i = 0; i < rounds; i++) {
        check(cuMemAlloc(&pointer, 4096), "cuMemAlloc");
        check(cuMemFree(pointer), "cuMemFree");
    }
}

static void async_pair(int rounds) {
    CUdeviceptr pointer;
    for (int i = 0; i < rounds; i++) {
        check(cuMemAllocAsync(&pointer, 4096, CU_STREAM_LEGACY), "cuMemAllocAsync");
        check(cuMemFreeAsync(pointer, CU_STREAM_LEGACY), "cuMemFreeAsync");
    }
}

static void info(int rounds) {
    size_t left, total;
    for (int i = 0; i < rounds; i++)
        check(cuMemGetInfo(&left, &total), "cuMemGetInfo");
}

static void unhooked(int rounds) {
    CUcontext context;
    for (int i = 0; i < rounds; i++)
        check(cuCtxGetCurrent(&context), "cuCtxGetCurrent");
}

static void launch(int rounds) {
    for (int i = 0; i < rounds; i++) {
        check(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        if (i % 512 == 511)
            check(cuCtxSynchronize(), "cuCtxSynchronize");
    }
    check(cuCtxSynchronize(), "cuCtxSynchronize");
}

/* Where MAPPED is in the environment by the program's own mapping, as the library makes them where they can move: so
 * that both cost the driver the same. */
static CUdeviceptr large_block(CUmemGenericAllocationHandle *handle) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr block;
    *handle = 0;
    if (!mapped) {
        check(cuMemAlloc(&block, LARGE), "cuMemAlloc");
        return block;
    }
    check(cuMemCreate(handle, LARGE, &properties, 0), "cuMemCreate");
    check(cuMemAddressReserve(&block, LARGE, 0, 0, 0), "cuMemAddressReserve");
    check(cuMemMap(block, LARGE, 0, *handle, 0), "cuMemMap");
    check(cuMemSetAccess(block, LARGE, &access, 1), "cuMemSetAccess");
    return block;
}

static void free_mapped(CUdeviceptr block, CUmemGenericAllocationHandle handle) {
    check(cuMemUnmap(block, LARGE), "cuMemUnmap");
    check(cuMemRelease(handle), "cuMemRelease");
    check(cuMemAddressFree(block, LARGE), "cuMemAddressFree");
}

static double small_ones(void) {
    static CUdeviceptr made[ROUNDS];
    double begun = now(CLOCK_MONOTONIC);
    for (int i = 0; i < ROUNDS; i++)
        check(cuMemAlloc(&made[i], 4096), "cuMemAlloc");
    double took = now(CLOCK_MONOTONIC) - begun;
    for (int i = 0; i < ROUNDS; i++)
        check(cuMemFree(made[i]), "cuMemFree");
    return took / ROUNDS;
}

static double large_ones(void) {
    CUdeviceptr made[LARGE_ONES];
    CUmemGenericAllocationHandle handles[LARGE_ONES];
    double begun = now(CLOCK_MONOTONIC);
    for (int i = 0; i < LARGE_ONES; i++)
        made[i] = large_block(&handles[i]);
    double took = now(CLOCK_MONOTONIC) - begun;
    for (int i = 0; i < LARGE_ONES; i++)
        if (handles[i])
            free_mapped(made[i], handles[i]);
        else
            check(cuMemFree(made[i]), "cuMemFree");
    return took / LARGE_ONES;
}

/* Of launches so far apart that the card has nothing to do in between. */
static double paced_launches(void) {
    void *parameters[] = {&blocks[0], &blocks[1], &blocks[2], &blocks[3]};
    double took = 0;
    for (int i = 0; i < PACED; i++) {
        double begun = now(CLOCK_MONOTONIC);
        check(cuLaunchKernel(kernel_with_blocks, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        double ended = now(CLOCK_MONOTONIC);
        took += ended - begun;
        while (now(CLOCK_MONOTONIC) < ended + PACE_NS)
            continue;
    }
    return took / PACED;
}

static void launch_with_blocks(int rounds) {
    void *parameters[] = {&blocks[0], &blocks[1], &blocks[2], &blocks[3]};
    for (int i = 0; i < rounds; i++) {
        check(cuLaunchKernel(kernel_with_blocks, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        if (i % 512 == 511)
            check(cuCtxSynchronize(), "cuCtxSynchronize");
    }
    check(cuCtxSynchronize(), "cuCtxSynchronize");
}

static void small_copy(int rounds) {
    unsigned long long word = 0;
    for (int i = 0; i < rounds; i++)
        check(cuMemcpyHtoD(blocks[0], &word, sizeof word), "cuMemcpyHtoD");
}

struct call {
    const char *name;
    /* ns that may be added; where blocks may move: what is handed in passes a gate, and what kernels use is noted */
    int bar, moving;
};

static void print(struct call call, double ns) {
    printf("%s\t%.1f\t%d\t%d\n", call.name, ns, call.bar, call.moving);
}

/* The fastest of several short runs: what other processes on the machine do only ever adds. */
static void measure(struct call call, void (*work)(int)) {
    double best = 1e18, end = now(CLOCK_MONOTONIC) + most_ns;
    work(ROUNDS);
    for (int i = 0; i < REPEATS && (i == 0 || now(CLOCK_MONOTONIC) < end); i++) {
        double begun = now(CLOCK_MONOTONIC);
        work(ROUNDS);
        double each = (now(CLOCK_MONOTONIC) - begun) / ROUNDS;
        best = each < best ? each : best;
    }
    print(call, best);
}

/* The same of work that says itself what a call took, since it does other things as well. */
static void measure_part(struct call call, double (*work)(void)) {
    double best = 1e18, end = now(CLOCK_MONOTONIC) + most_ns;
    work();
    for (int i = 0; i < REPEATS && (i == 0 || now(CLOCK_MONOTONIC) < end); i++) {
        double each = work();
        best = each < best ? each : best;
    }
    print(call, best);
}

static void start(void) {
    CUcontext context;
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

static void alone(void) {
    static const char text[] =
        ".version 7.0\n.target sm_75\n.address_size 64\n"
        ".visible .entry spin_100ns()\n{ ret; }\n"
        ".visible .entry blocks_100ns(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)\n{ ret; }\n";
    static CUdeviceptr live[LIVE];
    CUdeviceptr kept;
    CUmemGenericAllocationHandle handle;
    CUmodule module;
    mapped = getenv("MAPPED") != NULL;
    start();
    check(cuModuleLoadData(&module, text), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, "spin_100ns"), "cuModuleGetFunction");
    check(cuModuleGetFunction(&kernel_with_blocks, module, "blocks_100ns"), "cuModuleGetFunction");
    for (int i = 0; i < 4; i++)
        blocks[i] = large_block(&handle);
    measure((struct call){"cuMemAlloc+cuMemFree", 100, 150}, alloc_and_free);
    measure_part((struct call){"cuMemAlloc alone", 100, 150}, small_ones);
    measure_part((struct call){"...of 4 MiB", 200, 300}, large_ones);
    for (int i = 0; i < LIVE; i++)
        check(cuMemAlloc(&live[i], 4096), "cuMemAlloc");
    measure((struct call){"...with 10000 live blocks", 120, 170}, alloc_and_free);
    measure((struct call){"cuMemGetInfo", 20, 20}, info);
    measure((struct call){"not hooked: cuCtxGetCurrent", 2, 2}, unhooked);
    measure((struct call){"cuLaunchKernel", 20, 50}, launch);
    measure((struct call){"...of four large blocks", 20, 50}, launch_with_blocks);
    measure_part((struct call){"...every 100 us", 300, 400}, paced_launches);
    measure((struct call){"cuMemcpyHtoD", 2, 30}, small_copy);
    check(cuMemAllocAsync(&kept, 4096, CU_STREAM_LEGACY), "cuMemAllocAsync");
    measure((struct call){"cuMemAllocAsync+cuMemFreeAsync", 100, 150}, async_pair);
    check(cuModuleUnload(module), "cuModuleUnload");
}

/* All processes of the crowd at once; the mean over all calls of all of them, in processor time: it contains what they
 * cost one another, but not their turns of waiting for one of a few cores. */
static void crowd(void) {
    struct shared {
        _Atomic int ready;
        double each[PROCESSES];
    } *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < PROCESSES; i++) {
        if (fork() != 0)
            continue;
        start();
        alloc_and_free(ROUNDS);
        for (shared->ready++; shared->ready < PROCESSES;)
            usleep(1000);
        double begun = now(CLOCK_PROCESS_CPUTIME_ID);
        alloc_and_free(CROWD_ROUNDS);
        shared->each[i] = (now(CLOCK_PROCESS_CPUTIME_ID) - begun) / CROWD_ROUNDS;
        exit(0);
    }
    double sum = 0;
    for (int status, i = 0; i < PROCESSES; i++) {
        wait(&status);
        check(status ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS, "a process of the crowd");
    }
    for (int i = 0; i < PROCESSES; i++)
        sum += shared->each[i];
    printf("%.1f\n", sum / PROCESSES);
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "crowd") == 0) {
        crowd();
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "quick") == 0)
        most_ns = QUICK_NS;
    alone();
    return 0;
}
