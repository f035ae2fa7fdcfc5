/* Programs that run work whose time is hard to measure. `escapes MANNER KERNEL [COUNT]`: the kernel's name says how
 * long it runs; what repeats goes on until the program is killed, and says "ready" when it begins. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ok.h"

#define MOST 64

static const char *kernel_name;
static int count;
static char **again;

static CUcontext context_on(int ordinal) {
    CUdevice device;
    CUcontext made;
    OK(cuDeviceGet(&device, ordinal));
    OK(cuCtxCreate_v4(&made, NULL, 0, device));
    return made;
}

static const char *text_of(const char *name) {
    static char text[256];
    snprintf(text, sizeof text, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry %s()\n{ ret; }\n",
             name);
    return text;
}

static CUfunction function(const char *name) {
    CUmodule module;
    CUfunction found;
    OK(cuModuleLoadData(&module, text_of(name)));
    OK(cuModuleGetFunction(&found, module, name));
    return found;
}

static CUstream stream_new(void) {
    CUstream made;
    OK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
    return made;
}

static void launch_as(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream) {
    OK(cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, NULL, NULL));
}

static void launch(CUfunction kernel, CUstream stream) {
    launch_as(kernel, 1, 32, stream);
}

static void ready(void) {
    printf("ready\n");
    fflush(stdout);
}

static void loop(CUfunction kernel, CUstream stream) {
    ready();
    for (;;) {
        launch(kernel, stream);
        OK(cuStreamSynchronize(stream));
    }
}

/* What a program may have done before, and then loops. */

static void plain(void) {
    context_on(0);
    loop(function(kernel_name), stream_new());
}

static void asynchronous(void) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    ready();
    for (;;)
        launch(kernel, stream);
}

static CUfunction flooding;

static void *floods(void *context) {
    CUstream streams[4];
    cuCtxSetCurrent(context);
    for (int i = 0; i < 4; i++)
        streams[i] = stream_new();
    for (;;)
        for (int i = 0; i < 4; i++)
            launch(flooding, streams[i]);
    return NULL;
}

/* More under way at once than the library has events for, as long as nothing is known of the kernel. */
static void flood(void) {
    CUcontext context = context_on(0);
    flooding = function(kernel_name);
    for (int i = 1; i < count; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, floods, context);
    }
    ready();
    floods(context);
}

static void capture_in(CUstreamCaptureMode mode) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    OK(cuStreamBeginCapture_v2(stream_new(), mode));
    if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) { /* what it forbids this thread */
        CUstreamCaptureMode mine = CU_STREAM_CAPTURE_MODE_RELAXED;
        OK(cuThreadExchangeStreamCaptureMode(&mine));
    }
    loop(kernel, stream);
}

static void capture_relaxed(void) {
    capture_in(CU_STREAM_CAPTURE_MODE_RELAXED);
}

static void *captures_globally(void *context) {
    OK(cuCtxSetCurrent(context));
    OK(cuStreamBeginCapture_v2(stream_new(), CU_STREAM_CAPTURE_MODE_GLOBAL));
    for (;;)
        pause();
}

static void capture_global(void) {
    pthread_t thread;
    CUcontext context = context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    CUstreamCaptureMode mine = CU_STREAM_CAPTURE_MODE_RELAXED;
    pthread_create(&thread, NULL, captures_globally, context);
    OK(cuThreadExchangeStreamCaptureMode(&mine));
    loop(kernel, stream);
}

static void contexts(void) {
    CUfunction kernel = NULL;
    for (int i = 0; i < count; i++) {
        context_on(0);
        kernel = function(kernel_name);
        launch(function("spin_10us"), NULL);
        OK(cuCtxSynchronize());
    }
    loop(kernel, NULL);
}

static void contexts_in_turn(void) {
    CUcontext made[MOST];
    CUfunction kernel[MOST];
    for (int i = 0; i < count; i++) {
        made[i] = context_on(0);
        kernel[i] = function(kernel_name);
    }
    ready();
    for (int i = 0;; i = (i + 1) % count) {
        OK(cuCtxSetCurrent(made[i]));
        launch(kernel[i], NULL);
        OK(cuCtxSynchronize());
    }
}

/* No two launches are alike. */
static void unlike(void) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    ready();
    for (unsigned i = 0;; i++)
        launch_as(kernel, 1u << i / 1024 % 16, i % 1024 + 1, stream);
}

static void unlike_and_waits(void) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    ready();
    for (unsigned i = 0;; i++) {
        launch_as(kernel, 1u << i / 1024 % 16, i % 1024 + 1, stream);
        OK(cuStreamSynchronize(stream));
    }
}

/* More kinds of launches than anybody remembers, then one more. */
static void many_kinds(void) {
    context_on(0);
    CUfunction kernel = function("spin_1us");
    CUstream stream = stream_new();
    for (unsigned i = 0; i < (unsigned)count; i++)
        launch_as(kernel, 1u << i / 1024, i % 1024 + 1, stream);
    OK(cuStreamSynchronize(stream));
    loop(function(kernel_name), stream);
}

/* Its argument says how long a launch takes, in us. */
static CUfunction takes_us(void) {
    CUmodule module;
    CUfunction found;
    OK(cuModuleLoadData(
        &module,
        ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry spin_arg_us(.param .u64 us)\n{ ret; }\n"));
    OK(cuModuleGetFunction(&found, module, "spin_arg_us"));
    return found;
}

static void launch_of(CUfunction kernel, uint64_t us, CUstream stream) {
    void *parameters[] = {&us};
    OK(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

/* Launches are alike, but the last of `count` is long. */
static void seldom_long(bool waits) {
    context_on(0);
    CUfunction kernel = takes_us();
    CUstream stream = stream_new();
    ready();
    for (int i = 1;; i = i % count + 1) {
        launch_of(kernel, i < count ? 10 : 20000, stream);
        if (waits)
            OK(cuStreamSynchronize(stream));
    }
}

static void seldom_long_queued(void) {
    seldom_long(false);
}

static void seldom_long_awaited(void) {
    seldom_long(true);
}

/* Launches of 20 ms, until their time is known; then of 50 ms. */
static void grows(void) {
    context_on(0);
    CUfunction kernel = takes_us();
    CUstream stream = stream_new();
    for (int i = 0;; i++) {
        if (i == count)
            ready();
        launch_of(kernel, i < count ? 20000 : 50000, stream);
        OK(cuStreamSynchronize(stream));
    }
}

/* As seldom_long, once, and the process ends. */
static void long_at_last(void) {
    context_on(0);
    CUfunction kernel = takes_us();
    CUstream stream = stream_new();
    for (int i = 0; i < 100; i++) {
        launch_of(kernel, i < 99 ? 10 : 200000, stream);
        OK(cuStreamSynchronize(stream));
    }
    _exit(0);
}

static void context_each(void) {
    ready();
    for (;;) {
        CUcontext context = context_on(0);
        launch(function(kernel_name), NULL);
        OK(cuCtxDestroy_v2(context));
    }
}

static void primary_each(void) {
    CUdevice device;
    CUcontext context;
    OK(cuDeviceGet(&device, 0));
    ready();
    for (;;) {
        OK(cuDevicePrimaryCtxRetain(&context, device));
        OK(cuCtxSetCurrent(context));
        launch(function(kernel_name), NULL);
        OK(cuDevicePrimaryCtxRelease_v2(device));
        OK(cuDevicePrimaryCtxReset_v2(device));
    }
}

static void stream_each(void) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    ready();
    for (;;) {
        CUstream stream = stream_new();
        launch(kernel, stream);
        OK(cuStreamDestroy_v2(stream));
    }
}

static void module_each(void) {
    context_on(0);
    ready();
    for (;;) {
        CUmodule module;
        CUfunction found;
        OK(cuModuleLoadData(&module, text_of(kernel_name)));
        OK(cuModuleGetFunction(&found, module, kernel_name));
        launch(found, NULL);
        OK(cuCtxSynchronize());
        OK(cuModuleUnload(module));
    }
}

struct once {
    CUcontext context;
    CUfunction kernel;
};

static void *launches_once(void *given) {
    const struct once *once = given;
    OK(cuCtxSetCurrent(once->context));
    launch(once->kernel, CU_STREAM_PER_THREAD);
    return NULL;
}

static void thread_each(void) {
    pthread_t thread;
    struct once once = {.context = context_on(0)};
    once.kernel = function(kernel_name);
    ready();
    for (;;) {
        pthread_create(&thread, NULL, launches_once, &once);
        pthread_join(thread, NULL);
    }
}

static struct once called_back;

static sem_t launched;

static void *launch_when_called(void *stream) {
    OK(cuCtxSetCurrent(called_back.context));
    launch(called_back.kernel, stream);
    sem_post(&launched);
    return NULL;
}

static void CUDA_CB hosted(void *stream) {
    pthread_t thread; /* a host function must not call the driver; what it starts may */
    pthread_create(&thread, NULL, launch_when_called, stream);
    pthread_detach(thread);
}

static void host_functions(void) {
    called_back.context = context_on(0);
    called_back.kernel = function(kernel_name);
    CUstream one = stream_new(), other = stream_new();
    sem_init(&launched, 0, 0);
    ready();
    for (;;) {
        OK(cuLaunchHostFunc(one, hosted, other));
        OK(cuStreamSynchronize(one));
        sem_wait(
            &launched); /* a thread that waits for its turn: the next one would wait, too, until no more can start */
        OK(cuStreamSynchronize(other));
    }
}

/* A stream of a context that is not the current one. */
static void foreign_stream(void) {
    CUcontext there = context_on(0);
    CUlibrary library;
    CUkernel kernel;
    OK(cuLibraryLoadData(&library, text_of(kernel_name), NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&kernel, library, kernel_name));
    CUstream stream = stream_new();
    (void)there;
    context_on(0);
    loop((CUfunction)kernel, stream);
}

static void no_context(void) {
    CUcontext there = context_on(0);
    CUlibrary library;
    CUkernel kernel;
    OK(cuLibraryLoadData(&library, text_of(kernel_name), NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&kernel, library, kernel_name));
    CUstream stream = stream_new();
    OK(cuCtxSetCurrent(NULL));
    ready();
    for (;;) {
        launch((CUfunction)kernel, stream);
        OK(cuCtxSetCurrent(there));
        OK(cuStreamSynchronize(stream));
        OK(cuCtxSetCurrent(NULL));
    }
}

/* Launches on the first card while the second one is current. */
static void other_card(void) {
    context_on(0);
    CUlibrary library;
    CUkernel kernel;
    OK(cuLibraryLoadData(&library, text_of(kernel_name), NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&kernel, library, kernel_name));
    CUstream stream = stream_new();
    context_on(1);
    loop((CUfunction)kernel, stream);
}

/* A graph with a node on each card, launched on the first one; by hand its nodes are added to no stream. */
static void graph_on_two(bool by_hand) {
    CUcontext first = context_on(0);
    CUfunction here = function(kernel_name), there;
    CUstream stream = stream_new(), other;
    CUevent begun, ended;
    CUgraph graph;
    CUgraphExec exec;
    OK(cuEventCreate(&begun, CU_EVENT_DISABLE_TIMING));
    CUcontext second = context_on(1);
    there = function(kernel_name);
    other = stream_new();
    OK(cuEventCreate(&ended, CU_EVENT_DISABLE_TIMING));
    OK(cuCtxSetCurrent(first));
    if (by_hand) {
        CUgraphNode node;
        CUDA_KERNEL_NODE_PARAMS node_of = {.func = here, 1, 1, 1, 32, 1, 1};
        OK(cuGraphCreate(&graph, 0));
        OK(cuGraphAddKernelNode(&node, graph, NULL, 0, &node_of));
        node_of.func = there;
        OK(cuGraphAddKernelNode(&node, graph, NULL, 0, &node_of));
    } else {
        OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        launch(here, stream);
        OK(cuEventRecord(begun, stream));
        OK(cuCtxSetCurrent(second));
        OK(cuStreamWaitEvent(other, begun, 0));
        launch(there, other);
        OK(cuEventRecord(ended, other));
        OK(cuCtxSetCurrent(first));
        OK(cuStreamWaitEvent(stream, ended, 0));
        OK(cuStreamEndCapture(stream, &graph));
    }
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    ready();
    for (;;) {
        OK(cuGraphLaunch(exec, stream));
        OK(cuStreamSynchronize(stream));
    }
}

static void graph_captured(void) {
    graph_on_two(false);
}

static void graph_by_hand(void) {
    graph_on_two(true);
}

/* A graph of one card, where there are two: that card alone pays. */
static void graph_on_one(void) {
    context_on(0);
    CUfunction kernel = function(kernel_name);
    CUstream stream = stream_new();
    CUgraph graph;
    CUgraphExec exec;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    launch(kernel, stream);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    ready();
    for (;;) {
        OK(cuGraphLaunch(exec, stream));
        OK(cuStreamSynchronize(stream));
    }
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void cooperative_on_two(void) {
    CUDA_LAUNCH_PARAMS list[2] = {0};
    for (int i = 0; i < 2; i++) {
        context_on(i);
        list[i] = (CUDA_LAUNCH_PARAMS){.function = function(kernel_name),
                                       .gridDimX = 1,
                                       .gridDimY = 1,
                                       .gridDimZ = 1,
                                       .blockDimX = 32,
                                       .blockDimY = 1,
                                       .blockDimZ = 1,
                                       .hStream = stream_new()};
    }
    ready();
    for (;;) {
        OK(cuLaunchCooperativeKernelMultiDevice(list, 2, 0));
        OK(cuStreamSynchronize(list[1].hStream));
        OK(cuStreamSynchronize(list[0].hStream));
    }
}

/* One launch, and the end of the process. */

static void once(bool waits) {
    context_on(0);
    CUstream stream = stream_new();
    launch(function(kernel_name), stream);
    if (waits)
        OK(cuStreamSynchronize(stream));
}

static void once_exits(void) {
    once(true);
    _exit(0);
}

static void once_returns(void) {
    once(true);
}

static void once_is_killed(void) {
    once(true);
    kill(getpid(), SIGKILL);
}

static void once_goes_on(void) {
    once(true);
    if (count <= 1)
        _exit(0);
    char left[16];
    snprintf(left, sizeof left, "%d", count - 1);
    again[3] = left;
    execv("/proc/self/exe", again);
    _exit(1);
}

/* It never asks whether the kernel has ended, but knows when. */
static void once_sleeps(void) {
    once(false);
    usleep((useconds_t)count * 1000);
    _exit(0);
}

static void once_polls(void) {
    context_on(0);
    CUstream stream = stream_new();
    launch(function(kernel_name), stream);
    while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
        usleep(100);
    _exit(0);
}

/* As many as `count` threads, each with a long kernel of its own. */
static CUcontext shared;

static void *launches_its_own(void *number) {
    char name[32];
    snprintf(name, sizeof name, "own%d_%s", (int)(intptr_t)number, strchr(kernel_name, '_') + 1);
    OK(cuCtxSetCurrent(shared));
    launch(function(name), CU_STREAM_PER_THREAD);
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    return NULL;
}

static void crowd(void) {
    pthread_t threads[MOST];
    shared = context_on(0);
    ready();
    for (;;) {
        for (intptr_t i = 0; i < count; i++)
            pthread_create(&threads[i], NULL, launches_its_own, (void *)i);
        for (int i = 0; i < count; i++)
            pthread_join(threads[i], NULL);
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} manners[] = {
    {"plain", plain},
    {"asynch", asynchronous},
    {"flood", flood},
    {"capture-relaxed", capture_relaxed},
    {"capture-global", capture_global},
    {"contexts", contexts},
    {"contexts-in-turn", contexts_in_turn},
    {"unlike", unlike},
    {"unlike-and-waits", unlike_and_waits},
    {"many-kinds", many_kinds},
    {"seldom-long", seldom_long_queued},
    {"seldom-long-awaited", seldom_long_awaited},
    {"grows", grows},
    {"long-at-last", long_at_last},
    {"context-each", context_each},
    {"primary-each", primary_each},
    {"stream-each", stream_each},
    {"module-each", module_each},
    {"thread-each", thread_each},
    {"host-functions", host_functions},
    {"foreign-stream", foreign_stream},
    {"no-context", no_context},
    {"other-card", other_card},
    {"graph-captured", graph_captured},
    {"graph-by-hand", graph_by_hand},
    {"graph-on-one", graph_on_one},
    {"cooperative-on-two", cooperative_on_two},
    {"once-exits", once_exits},
    {"once-returns", once_returns},
    {"once-is-killed", once_is_killed},
    {"once-goes-on", once_goes_on},
    {"once-sleeps", once_sleeps},
    {"once-polls", once_polls},
    {"crowd", crowd},
};

int main(int argc, char **argv) {
    kernel_name = argc > 2 ? argv[2] : "spin_10ms";
    count = argc > 3 ? atoi(argv[3]) : 1;
    again = argv;
    OK(cuInit(0));
    for (unsigned i = 0; i < sizeof manners / sizeof *manners; i++)
        if (argc > 1 && strcmp(manners[i].name, argv[1]) == 0) {
            manners[i].run();
            return 0;
        }
    return 2;
}
