/* One program that keeps a simulated card busy in one manner: `shapes NAME [held]`. Linked with libcuda; limited by the
 * preloaded library, or not.
 *
 * It says "ready" and begins; with `held` it begins at the first line on its standard input. Each further line makes it
 * pause, and go on again. It ends when its standard input does. `shapes cost` measures launches instead and prints
 * "mean NS", "p999 NS" and how many of a thousand took more than 2 us. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000u
#define THREADS 8
#define STREAMS 4
#define GRAPH_NODES 20
#define BURST_LAUNCHES 20
#define BURST_PERIOD_NS (30u * MS)
#define COST_PARTS 10
#define COST_ROUNDS 10 /* batches in each part */
#define COST_BATCH 4000
#define COST_SHORT 1000 /* launches of a batch whose mean is taken */
#define COST_SLOW_NS 2000u
#define COST_REST_NS (5u * MS) /* after each batch, so that no limit holds the next one back */

static CUcontext context;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static _Atomic int paused;

static void check(CUresult result, const char *what) {
    if (result) {
        fprintf(stderr, "%s: driver error %d\n", what, result);
        exit(1);
    }
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A kernel whose name says how long it runs; of one whose name says so, its argument does. */
static CUfunction kernel(const char *name) {
    char text[256];
    CUmodule module;
    CUfunction found;
    snprintf(text, sizeof text,
             ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry %s(.param .u32 work)\n{ ret; }\n", name);
    check(cuModuleLoadData(&module, text), "cuModuleLoadData");
    check(cuModuleGetFunction(&found, module, name), "cuModuleGetFunction");
    return found;
}

static void launch(CUfunction function, unsigned grid, CUstream stream, uint32_t work) {
    void *parameters[] = {&work};
    check(cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}

static void finish(void) {
    check(cuCtxSynchronize(), "cuCtxSynchronize");
}

static CUstream new_stream(void) {
    CUstream stream;
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return stream;
}

static uint64_t random_bits(void) {
    static __thread uint64_t state = 0x9e3779b97f4a7c15u; /* xorshift64, Marsaglia 2003 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static CUfunction function; /* of the shape that runs */

static void step_wide(void) {
    launch(function, 1024, NULL, 0);
}

static void step_narrow(void) {
    launch(function, 64, NULL, 0);
}

static void step_sync(void) {
    launch(function, 1024, NULL, 0);
    finish();
}

static void step_extended(void) {
    CUlaunchConfig config = {
        .gridDimX = 1024, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 256, .blockDimY = 1, .blockDimZ = 1};
    uint32_t work = 0;
    void *parameters[] = {&work};
    check(cuLaunchKernelEx(&config, function, parameters, NULL), "cuLaunchKernelEx");
}

static void step_cooperative(void) {
    uint32_t work = 0;
    void *parameters[] = {&work};
    check(cuLaunchCooperativeKernel(function, 40, 1, 1, 256, 1, 1, 0, NULL, parameters), "cuLaunchCooperativeKernel");
}

static void step_graph(void) {
    static CUgraphExec executable;
    static CUstream stream;
    if (!executable) {
        CUgraph graph;
        stream = new_stream();
        check(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
        for (int i = 0; i < GRAPH_NODES; i++)
            launch(function, 1024, stream, 0);
        check(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
        check(cuGraphInstantiate(&executable, graph, 0), "cuGraphInstantiate");
    }
    check(cuGraphLaunch(executable, stream), "cuGraphLaunch");
}

/* A burst begins every 30 ms, or at once when the one before it took longer. */
static void step_burst(void) {
    static uint64_t next;
    uint64_t now = now_ns();
    if (next < now)
        next = now;
    struct timespec until = {.tv_sec = (time_t)(next / 1000000000u), .tv_nsec = (long)(next % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    for (int i = 0; i < BURST_LAUNCHES; i++)
        launch(function, 1024, NULL, 0);
    finish();
    next += BURST_PERIOD_NS;
}

static void step_alternating(void) {
    static uint32_t turn;
    launch(function, 1024, NULL, turn++ % 2 ? 10000 : 10);
}

/* A kernel that works off what has been queued for it: from 0.2 to 20 ms, all orders of magnitude alike. */
static void step_persistent(void) {
    uint32_t work = 200u << random_bits() % 7;
    launch(function, 40, NULL, work + (uint32_t)(random_bits() % work) / 2);
    finish();
}

static void step_streams(void) {
    static __thread CUstream streams[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        if (!streams[i])
            streams[i] = new_stream();
        launch(function, 16, streams[i], 0);
    }
}

static const struct shape {
    const char *name, *kernel;
    void (*step)(void);
    int threads;
} shapes[] = {
    {"wide", "spin_100us", step_wide, 1},
    {"narrow", "spin_100us", step_narrow, 1},
    {"tiny", "spin_10us", step_wide, 1},
    {"2ms", "spin_2ms", step_wide, 1},
    {"sync", "spin_100us", step_sync, 1},
    {"sync2ms", "spin_2ms", step_sync, 1},
    {"long", "spin_50ms", step_sync, 1},
    {"extended", "spin_100us", step_extended, 1},
    {"cooperative", "spin_100us", step_cooperative, 1},
    {"graph", "spin_100us", step_graph, 1},
    {"bursts", "spin_500us", step_burst, 1},
    {"lognormal", "spin_100us_sigma20", step_wide, 1},
    {"alternating", "spin_arg_us", step_alternating, 1},
    {"persistent", "spin_arg_us", step_persistent, 1},
    {"streams", "spin_1ms", step_streams, 1},
    {"threads", "spin_100us", step_streams, THREADS},
};

static void *work(void *given) {
    const struct shape *shape = given;
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    for (;;) {
        if (paused) {
            pthread_mutex_lock(&lock);
            while (paused)
                pthread_cond_wait(&changed, &lock);
            pthread_mutex_unlock(&lock);
        }
        shape->step();
    }
    return NULL;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Wakes no processor from its sleep when it is over. */
static void rest(void) {
    finish();
    for (uint64_t until = now_ns() + COST_REST_NS; now_ns() < until;)
        ;
}

/* Mean of the fastest batch and the 99.9th percentile of launches timed one by one in the quietest part: what else the
 * machine does only ever adds. */
static void cost(void) {
    enum { EACH = COST_ROUNDS * COST_BATCH };
    int slow = 0;
    uint64_t tail = UINT64_MAX, *times = calloc(EACH, sizeof *times);
    double best = 1e18;
    for (int round = 0; times && round < COST_PARTS * COST_ROUNDS; round++) {
        for (int part = 0; part < COST_BATCH / COST_SHORT; part++) {
            uint64_t begun = now_ns();
            for (int i = 0; i < COST_SHORT; i++)
                launch(function, 1, NULL, 0);
            double each = (double)(now_ns() - begun) / COST_SHORT;
            best = each < best ? each : best;
        }
        rest();
    }
    for (int part = 0; times && part < COST_PARTS; part++) {
        for (int i = 0; i < EACH; i++) {
            uint64_t begun = now_ns();
            launch(function, 1, NULL, 0);
            times[i] = now_ns() - begun;
            if (i % COST_BATCH == COST_BATCH - 1)
                rest();
        }
        qsort(times, EACH, sizeof *times, by_size);
        if (times[EACH - EACH / 1000] >= tail)
            continue;
        tail = times[EACH - EACH / 1000];
        for (slow = 0; slow < EACH && times[EACH - 1 - slow] > COST_SLOW_NS; slow++)
            ;
    }
    printf("mean %.1f\np999 %llu\nslow %.3f\n", best, (unsigned long long)tail, slow * 1000.0 / EACH);
    free(times);
}

int main(int count, char **arguments) {
    const struct shape *shape = NULL;
    const char *name = count > 1 ? arguments[1] : "";
    pthread_t thread;
    char line[16];
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    if (strcmp(name, "cost") == 0) {
        function = kernel("spin_10ns");
        cost();
        return 0;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, name) == 0)
            shape = &shapes[i];
    if (!shape) {
        fprintf(stderr, "usage: shapes NAME [held]; no shape is called '%s'\n", name);
        return 2;
    }
    function = kernel(shape->kernel);
    paused = count > 2;
    for (int i = 0; i < shape->threads; i++)
        if (pthread_create(&thread, NULL, work, (void *)(uintptr_t)shape))
            return 1;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        pthread_mutex_lock(&lock);
        paused = !paused;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    _exit(0);
}
