/* Threads that allocate, fill, copy, add up, wait for and free blocks of 2 to 8 MiB while the library moves them: every
 * byte that is looked at must be the one that was written.
 *
 * SEED THREADS OPERATIONS BLOCKS (per thread; 0 operations: until the input ends). Each thread has another kind of
 * stream: one that was created, its own default one, the legacy one, one that does not block; the first the one of
 * number SEED % 4. Prints "done OPERATIONS REFUSED" and waits for the end of its input, with its blocks left allocated;
 * or says what was wrong where, and ends with 1. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ok.h"

#define MIB (UINT64_C(1) << 20)
#define WORDS 256u /* at either end of a block, that are looked at */
#define MOST_BLOCKS 64

static const char image[] =
    ".version 8.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry touch_fill_3us(.param .u64 to, .param .u64 words, .param .u64 value) { ret; }\n"
    ".visible .entry touch_add_5us(.param .u64 to, .param .u64 words, .param .u64 value) { ret; }\n"
    ".visible .entry touch_add_2ms(.param .u64 to, .param .u64 words, .param .u64 value) { ret; }\n"
    ".visible .entry touch_copy_20us(.param .u64 to, .param .u64 from, .param .u64 words) { ret; }\n";

static CUcontext context;
static CUfunction fill_kernel, add_kernel, slow_add_kernel, copy_kernel;
static atomic_bool over;
static atomic_ulong operations, refused;
static unsigned long wanted;
static unsigned blocks_per_thread;

struct block {
    CUdeviceptr base;
    uint64_t bytes;
    uint64_t words[2][WORDS];
};

struct worker {
    pthread_t thread;
    uint64_t random;
    unsigned number, kind;
    CUstream stream;
    struct block blocks[MOST_BLOCKS];
};

static uint64_t draw(struct worker *me, uint64_t below) {
    me->random = me->random * 6364136223846793005ull + 1442695040888963407ull;
    return (me->random >> 33) % below;
}

static CUdeviceptr at(const struct block *block, unsigned end, unsigned word) {
    return block->base + (end ? block->bytes - WORDS * 8 : 0) + word * 8;
}

static void launch(struct worker *me, CUfunction function, uint64_t a, uint64_t b, uint64_t c) {
    void *list[] = {&a, &b, &c};
    uint64_t buffer[] = {a, b, c};
    size_t size = sizeof buffer;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    if (draw(me, 4))
        OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, me->stream, list, NULL));
    else
        OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, me->stream, NULL, extra));
}

static void finish(struct worker *me) {
    if (draw(me, 3)) {
        OK(cuStreamSynchronize(me->stream));
    } else if (draw(me, 2)) {
        OK(cuCtxSynchronize());
    } else {
        CUevent event;
        OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cuEventRecord(event, me->stream));
        OK(cuEventSynchronize(event));
        OK(cuEventDestroy(event));
    }
}

static void compare(struct worker *me, const struct block *block) {
    uint64_t found[WORDS];
    for (unsigned end = 0; end < 2; end++) {
        memset(found, 0xee, sizeof found);
        OK(cuMemcpyDtoHAsync(found, at(block, end, 0), sizeof found, me->stream));
        finish(me);
        for (unsigned i = 0; i < WORDS; i++)
            if (found[i] != block->words[end][i]) {
                printf("thread %u, operation %lu: word %u of end %u of %llu bytes at %llx is %llx, not %llx\n",
                       me->number, operations, i, end, (unsigned long long)block->bytes,
                       (unsigned long long)block->base, (unsigned long long)found[i],
                       (unsigned long long)block->words[end][i]);
                fflush(stdout);
                _exit(1);
            }
    }
}

static void release(struct worker *me, struct block *block) {
    compare(me, block);
    OK(cuMemFree(block->base));
    block->base = 0;
}

static void allocate(struct worker *me, struct block *block) {
    block->bytes = (2 + draw(me, 7)) * MIB - draw(me, 3) * 4096;
    CUresult result = cuMemAlloc(&block->base, block->bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        atomic_fetch_add(&refused, 1);
        block->base = 0;
        return;
    }
    OK(result);
    for (unsigned end = 0; end < 2; end++) {
        const uint64_t value = draw(me, UINT32_MAX);
        launch(me, fill_kernel, at(block, end, 0), WORDS, value);
        for (unsigned i = 0; i < WORDS; i++)
            block->words[end][i] = value;
    }
}

static void change(struct worker *me, struct block *block, struct block *other) {
    const unsigned end = (unsigned)draw(me, 2), first = (unsigned)draw(me, WORDS),
                   count = 1 + (unsigned)draw(me, WORDS - first);
    const uint64_t value = draw(me, UINT32_MAX);
    uint64_t *words = &block->words[end][first];
    switch (draw(me, 6)) {
    case 0:
    case 1:
        launch(me, draw(me, 16) ? add_kernel : slow_add_kernel, at(block, end, first), count, value);
        for (unsigned i = 0; i < count; i++)
            words[i] += value;
        break;
    case 2:
        launch(me, copy_kernel, at(block, end, first), at(other, !end, first), count);
        memcpy(words, &other->words[!end][first], count * 8);
        break;
    case 3:
        OK(cuMemcpyDtoDAsync(at(block, end, first), at(other, !end, first), count * 8, me->stream));
        memcpy(words, &other->words[!end][first], count * 8);
        break;
    case 4:
        for (unsigned i = 0; i < count; i++)
            words[i] = value + i;
        OK(cuMemcpyHtoDAsync(at(block, end, first), words, count * 8, me->stream));
        finish(me); /* `words` may be written again */
        break;
    default:
        OK(cuMemsetD32Async(at(block, end, first), (unsigned)value, count * 2, me->stream));
        for (unsigned i = 0; i < count; i++)
            words[i] = (value & UINT32_MAX) << 32 | (value & UINT32_MAX);
    }
}

static void step(struct worker *me) {
    struct block *block = &me->blocks[draw(me, blocks_per_thread)],
                 *other = &me->blocks[draw(me, 1 + blocks_per_thread / 4)];
    if (!block->base)
        allocate(me, block);
    else if (draw(me, 64) == 0)
        release(me, block);
    else if (draw(me, 16) == 0)
        compare(me, block);
    else
        change(me, block, other->base ? other : block);
    if (draw(me, 8) == 0)
        finish(me);
}

static void *work(void *argument) {
    struct worker *me = argument;
    OK(cuCtxSetCurrent(context));
    switch (me->kind) {
    case 0: OK(cuStreamCreate(&me->stream, CU_STREAM_DEFAULT)); break;
    case 1: me->stream = CU_STREAM_PER_THREAD; break;
    case 2: me->stream = NULL; break;
    default: OK(cuStreamCreate(&me->stream, CU_STREAM_NON_BLOCKING));
    }
    while (!atomic_load(&over) && (!wanted || atomic_load(&operations) < wanted)) {
        step(me);
        atomic_fetch_add(&operations, 1);
        if (me->kind == 0 && draw(me, 256) == 0) {
            OK(cuStreamDestroy(me->stream)); /* with what is still to be done */
            CUstream next;
            OK(cuStreamCreate(&next, CU_STREAM_DEFAULT));
            OK(cuCtxSynchronize()); /* which orders what comes in the next one */
            me->stream = next;
        }
    }
    for (unsigned i = 0; i < blocks_per_thread; i++)
        if (me->blocks[i].base)
            compare(me, &me->blocks[i]);
    return NULL;
}

static void until_the_input_ends(void) {
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
}

int main(int count, char **words) {
    if (count != 5)
        return 2;
    CUmodule module;
    const unsigned threads = (unsigned)atoi(words[2]);
    struct worker *workers = calloc(threads, sizeof *workers);
    wanted = strtoul(words[3], NULL, 10);
    blocks_per_thread = (unsigned)atoi(words[4]);
    if (!workers || blocks_per_thread > MOST_BLOCKS)
        return 2;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&fill_kernel, module, "touch_fill_3us"));
    OK(cuModuleGetFunction(&add_kernel, module, "touch_add_5us"));
    OK(cuModuleGetFunction(&slow_add_kernel, module, "touch_add_2ms"));
    OK(cuModuleGetFunction(&copy_kernel, module, "touch_copy_20us"));
    for (unsigned i = 0; i < threads; i++) {
        workers[i].number = i;
        workers[i].kind = (unsigned)(strtoull(words[1], NULL, 10) + i) % 4;
        workers[i].random = strtoull(words[1], NULL, 10) * 1000003 + i;
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    }
    if (!wanted) {
        until_the_input_ends();
        atomic_store(&over, true);
    }
    for (unsigned i = 0; i < threads; i++)
        pthread_join(workers[i].thread, NULL);
    printf("done %lu %lu\n", operations, refused);
    fflush(stdout);
    until_the_input_ends();
    OK(cuModuleUnload(module));
    free(workers);
    return 0;
}
