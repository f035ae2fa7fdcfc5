/* Kills processes of one container at random moments while all of them allocate and free; prints what came of it.
 *
 * kills FOLDER KILLS PROCESSES SEED      (LD_PRELOAD, VGPU_SIM_DIR, VGPU_SIMULATE from the environment)
 *
 * Exit 0 when at the end the ledger said what the card held, no sample of either was above the limit and nothing was
 * released twice; 1 if not.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "arena.h"

#define MOST_PROCESSES 64
#define HELD 24
#define BURST 20
#define PAUSE_NS 2000000
#define LATE_NS 100000000u
#define BUCKETS 40

static struct shared {
    atomic_bool stop;
    _Atomic uint32_t resting;
    _Atomic uint64_t operations, refused, longest, late, longest_own, late_own;
    _Atomic uint64_t histogram[BUCKETS]; /* by log2 of the nanoseconds */
} *shared;

struct held {
    enum { NOTHING, LINEAR, ORDERED, PHYSICAL } kind;
    CUdeviceptr pointer;
    CUmemGenericAllocationHandle handle;
};

static uint64_t chance_state;
static uint64_t chance(uint64_t below) {
    chance_state ^= chance_state << 13;
    chance_state ^= chance_state >> 7;
    chance_state ^= chance_state << 17;
    return (chance_state >> 11) % below;
}

static void at_least(_Atomic uint64_t *most, uint64_t value) {
    uint64_t seen = atomic_load(most);
    while (value > seen && !atomic_compare_exchange_weak(most, &seen, value)) {
    }
}

static CUresult get(struct held *held, uint64_t bytes) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}}};
    held->kind = (unsigned)(1 + chance(3));
    CUresult result = held->kind == LINEAR ? cuMemAlloc(&held->pointer, bytes)
                      : held->kind == ORDERED
                          ? cuMemAllocAsync(&held->pointer, bytes, NULL)
                          : cuMemCreate(&held->handle, (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), &properties, 0);
    if (result != CUDA_SUCCESS)
        held->kind = NOTHING;
    return result;
}

static CUresult put(struct held *held) {
    CUresult result = held->kind == LINEAR    ? cuMemFree(held->pointer)
                      : held->kind == ORDERED ? cuMemFreeAsync(held->pointer, NULL)
                                              : cuMemRelease(held->handle);
    held->kind = NOTHING;
    return result;
}

/* Time that this thread was ready to run and had no processor, so far. */
static uint64_t without_processor(void) {
    static int file = -1;
    char text[96] = "";
    unsigned long long ran, waited = 0;
    if (file < 0)
        file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file >= 0 && pread(file, text, sizeof text - 1, 0) > 0 && sscanf(text, "%llu %llu", &ran, &waited) == 2)
        return waited;
    return 0;
}

struct clock {
    uint64_t wall, waited;
};

static struct clock clock_start(void) {
    return (struct clock){.waited = without_processor(), .wall = arena_now_ns()};
}

static void note(struct clock begin, CUresult result) {
    uint64_t took = arena_now_ns() - begin.wall;
    if (took > LATE_NS / 20) { /* how much of it others had the processor */
        uint64_t waited = without_processor() - begin.waited, own = took > waited ? took - waited : 0;
        at_least(&shared->longest_own, own);
        if (own > LATE_NS)
            atomic_fetch_add(&shared->late_own, 1);
    }
    unsigned bucket = took ? 63 - (unsigned)__builtin_clzll(took) : 0;
    atomic_fetch_add(&shared->histogram[bucket < BUCKETS ? bucket : BUCKETS - 1], 1);
    atomic_fetch_add(&shared->operations, 1);
    at_least(&shared->longest, took);
    if (took > LATE_NS)
        atomic_fetch_add(&shared->late, 1);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        atomic_fetch_add(&shared->refused, 1);
}

static void member(uint64_t seed) {
    struct held held[HELD] = {{.kind = NOTHING}};
    CUcontext context;
    CUresult result;
    chance_state = seed * 0x9e3779b97f4a7c15ull + 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    arena_need(cuInit(0) == CUDA_SUCCESS, "cuInit");
    do {
        struct clock begin = clock_start();
        result = cuDevicePrimaryCtxRetain(&context, 0);
        note(begin, result);
    } while (result == CUDA_ERROR_OUT_OF_MEMORY && !atomic_load(&shared->stop) && usleep(1000) == 0);
    if (result == CUDA_SUCCESS)
        cuCtxSetCurrent(context);
    while (result == CUDA_SUCCESS && !atomic_load_explicit(&shared->stop, memory_order_relaxed)) {
        struct held *one = &held[chance(HELD)];
        uint64_t bytes = chance(4) ? 1 + chance(MIB) : 1 + chance(64 * MIB);
        struct clock begin = clock_start();
        CUresult answer = one->kind == NOTHING ? get(one, bytes) : put(one);
        note(begin, answer);
        if (answer != CUDA_SUCCESS && answer != CUDA_ERROR_OUT_OF_MEMORY)
            _exit(3);
        if (chance(BURST) == 0) { /* processors stay free, so that what waits waits for others' operations */
            struct timespec pause_ns = {.tv_nsec = PAUSE_NS};
            nanosleep(&pause_ns, NULL);
        }
    }
    CUmemoryPool pool;
    if (result == CUDA_SUCCESS && cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS)
        cuMemPoolTrimTo(pool, 0);
    atomic_fetch_add(&shared->resting, 1);
    for (;;)
        pause();
}

static pid_t start(uint64_t seed) {
    fflush(NULL);
    pid_t pid = fork();
    arena_need(pid >= 0, "fork");
    if (pid == 0)
        member(seed);
    return pid;
}

static bool bad;
static void check(bool good, const char *what, uint64_t value, uint64_t bound) {
    if (good)
        return;
    bad = true;
    fprintf(stderr, "WRONG: %s: %" PRIu64 ", allowed %" PRIu64 "\n", what, value, bound);
}

static uint64_t quantile(double share) {
    uint64_t sum = 0, all = atomic_load(&shared->operations);
    for (unsigned i = 0; i < BUCKETS; i++) {
        sum += atomic_load(&shared->histogram[i]);
        if ((double)sum >= share * (double)all)
            return UINT64_C(2) << i;
    }
    return 0;
}

static uint64_t samples;
static void sample(vgpu_region *region, uint64_t limit) {
    static struct vgpu_usage usage;
    vgpu_usage_read(region, &usage);
    struct vgpu_sim_card card = arena_truth();
    check(usage.cards[0].used <= limit, "charged at a moment", usage.cards[0].used, limit);
    check(card.used <= limit, "held at a moment", card.used, limit);
    check(usage.saturated == 0, "released twice", usage.saturated, 0);
    samples++;
}

int main(int count, char **arguments) {
    static struct vgpu_usage usage;
    arena_need(count == 5, "usage: kills FOLDER KILLS PROCESSES SEED");
    const char *folder = arguments[1];
    unsigned kills = (unsigned)atoi(arguments[2]), processes = (unsigned)atoi(arguments[3]);
    uint64_t seed = strtoull(arguments[4], NULL, 10);
    pid_t pids[MOST_PROCESSES];
    arena_need(processes > 0 && processes <= MOST_PROCESSES, "too many processes");
    struct vgpu_sim_card card = arena_card();
    vgpu_region *region = arena_container(folder, 0, &card, processes, 1024 * MIB);
    const bool limited = arena_limited();
    const uint64_t limit = limited ? 1024 * MIB + processes * card.context_bytes : card.memory;
    arena_enter(folder, 0);
    shared = arena_shared(sizeof *shared);
    chance_state = seed + 77;
    for (unsigned i = 0; i < processes; i++)
        pids[i] = start(seed + i);
    uint64_t begin = arena_now_ns();
    for (unsigned kill_number = 0; kill_number < kills; kill_number++) {
        struct timespec moment = {.tv_nsec = (long)chance(4000000)};
        nanosleep(&moment, NULL);
        unsigned victim = (unsigned)chance(processes);
        int status = 0;
        kill(pids[victim], SIGKILL);
        sample(region, limit);
        waitpid(pids[victim], &status, 0);
        check(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a process ended by itself with status",
              (uint64_t)status, SIGKILL);
        pids[victim] = start(seed + processes + kill_number);
        sample(region, limit);
    }
    uint64_t ended = arena_now_ns();
    atomic_store(&shared->stop, true);
    while (atomic_load(&shared->resting) < processes) {
        struct timespec moment = {.tv_nsec = 1000000};
        nanosleep(&moment, NULL);
    }
    vgpu_region_reap(region);
    vgpu_usage_read(region, &usage);
    card = arena_truth();
    if (limited)
        check(usage.cards[0].used == card.used, "charged when all rest, and held", usage.cards[0].used, card.used);
    printf("kills %u processes %u seconds %.1f operations %" PRIu64 " refused %" PRIu64 " samples %" PRIu64
           " charged %" PRIu64 " held %" PRIu64 " limit %" PRIu64 " longest_us %" PRIu64 " late %" PRIu64
           " longest_own_us %" PRIu64 " late_own %" PRIu64 " p50_ns %" PRIu64 " p999_ns %" PRIu64 " p99999_ns %" PRIu64
           "\n",
           kills, processes, (double)(ended - begin) / 1e9, atomic_load(&shared->operations),
           atomic_load(&shared->refused), samples, usage.cards[0].used, card.used, limit,
           atomic_load(&shared->longest) / 1000, atomic_load(&shared->late), atomic_load(&shared->longest_own) / 1000,
           atomic_load(&shared->late_own), quantile(0.5), quantile(0.999), quantile(0.99999));
    for (unsigned i = 0; i < processes; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    vgpu_region_reap(region);
    vgpu_usage_read(region, &usage);
    check(usage.cards[0].used == 0 && usage.process_count == 0, "charged when all are gone", usage.cards[0].used, 0);
    check(arena_truth().used == 0, "held when all are gone", arena_truth().used, 0);
    return bad;
}
