/* play TRACE CAPACITY LAUNCHES SEED MEMORY MIB WAIT NS: one trace of the bench as a program of the CUDA driver: blocks
 * of MIB mebibytes, launches that compute for NS nanoseconds and name the blocks that they touch, and a wait for the
 * card after every WAIT launches (0: none).
 *
 * CAPACITY is what the trace takes for the card's room. MEMORY: alloc, blocks of cuMemAlloc; or managed, of
 * cuMemAllocManaged, with all of the card but the room of CAPACITY blocks taken by something else. play ballast BYTES
 * takes all of the card but so much, and ends with its input.
 *
 * Prints "ready" with a context and waits for a line, then "allocated" with the blocks that the trace begins with, and
 * waits for another one; at the end the launches that it made and the nanoseconds that they took. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "trace.h"

#define PARAMETERS 16u /* the simulator looks at no more */
#define NAMED                                                                                                          \
    "(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 e, .param .u64 f, .param .u64 g, "       \
    ".param .u64 h, "                                                                                                  \
    ".param .u64 i, .param .u64 j, .param .u64 k, .param .u64 l, .param .u64 m, .param .u64 n, .param .u64 o, .param " \
    ".u64 p)"

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        const CUresult answer_ = (call);                                                                               \
        if (answer_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "play: line %d: %s: %d\n", __LINE__, #call, (int)answer_);                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

struct program {
    CUfunction kernel;
    CUdeviceptr blocks[BLOCKS];
    size_t bytes; /* of a block */
    bool managed;
};

static void add(struct program *program, uint32_t block) {
    if (program->managed)
        OK(cuMemAllocManaged(&program->blocks[block], program->bytes, CU_MEM_ATTACH_GLOBAL));
    else
        OK(cuMemAlloc(&program->blocks[block], program->bytes));
}

static void launch(const struct program *program, const struct trace *trace, const struct op *op) {
    CUdeviceptr named[PARAMETERS] = {0};
    void *list[PARAMETERS];
    if (op->count > PARAMETERS) {
        fprintf(stderr, "play: a launch touches %u blocks; at most %u can be named\n", op->count, PARAMETERS);
        exit(1);
    }
    for (uint32_t i = 0; i < PARAMETERS; i++) {
        if (i < op->count)
            named[i] = program->blocks[trace->touched[op->first + i]];
        list[i] = &named[i];
    }
    OK(cuLaunchKernel(program->kernel, 1, 1, 1, 32, 1, 1, 0, NULL, list, NULL));
}

static void play(struct program *program, const struct trace *trace, const struct op *from, unsigned long wait) {
    unsigned long launches = 0;
    for (const struct op *op = from; op < trace->ops + trace->count; op++) {
        if (op->kind == ADD) {
            add(program, op->count);
        } else if (op->kind == REMOVE) {
            OK(cuMemFree(program->blocks[op->count]));
        } else if (op->kind == LAUNCH) {
            launch(program, trace, op);
            if (wait && ++launches % wait == 0)
                OK(cuStreamSynchronize(NULL));
        }
    }
    OK(cuCtxSynchronize());
}

/* Takes all of the card but `left` bytes; it is never written. */
static void take_all_but(size_t left) {
    size_t unused, total;
    CUdeviceptr taken;
    OK(cuMemGetInfo(&unused, &total));
    if (unused > left)
        OK(cuMemAlloc(&taken, unused - left));
}

static void say(const char *what) {
    printf("%s\n", what);
    fflush(stdout);
    for (int character; (character = getchar()) != '\n';)
        if (character == EOF)
            exit(0);
}

static CUfunction kernel_of(const char *ns) {
    char name[64], image[1024];
    CUmodule module;
    CUfunction kernel;
    snprintf(name, sizeof name, "play_%sns", ns);
    snprintf(image, sizeof image, ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry %s%s { ret; }\n",
             name, NAMED);
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&kernel, module, name));
    return kernel;
}

static void begin(void) {
    CUdevice device;
    CUcontext context;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "ballast")) {
        begin();
        take_all_but(strtoull(argv[2], NULL, 10));
        say("ready");
        return 0;
    }
    if (argc != 9 || (strcmp(argv[5], "alloc") && strcmp(argv[5], "managed"))) {
        fprintf(stderr, "usage: play TRACE CAPACITY LAUNCHES SEED alloc|managed MIB WAIT NS | play ballast BYTES\n");
        return 2;
    }
    struct trace trace;
    const uint32_t capacity = (uint32_t)strtoul(argv[2], NULL, 10);
    struct program program = {.bytes = strtoull(argv[6], NULL, 10) << 20, .managed = !strcmp(argv[5], "managed")};
    if (make_trace(&trace, argv[1], (uint32_t)strtoul(argv[3], NULL, 10), capacity, strtoull(argv[4], NULL, 10))) {
        fprintf(stderr, "play: no trace %s\n", argv[1]);
        return 2;
    }
    begin();
    program.kernel = kernel_of(argv[8]);
    if (program.managed)
        take_all_but(capacity * program.bytes);
    say("ready");
    const struct op *op = trace.ops;
    for (; op->kind != LAUNCH; op++)
        if (op->kind == ADD)
            add(&program, op->count);
    say("allocated");
    const uint64_t begun = now_ns();
    play(&program, &trace, op, strtoul(argv[7], NULL, 10));
    printf("%u %llu\n", trace.launches, (unsigned long long)(now_ns() - begun));
    free(trace.ops);
    free(trace.touched);
    return 0;
}
