#define _GNU_SOURCE
#include "parameters.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fork.h"
#include "spin.h"

#define SLOTS 4096u /* power of two */
#define TRIES 8u
#define MOST_PARAMETERS 4096u
#define MOST 65536u /* entries ever made: none is freed, as another thread may be reading it */
static _Atomic(struct vgpu_parameters *) slots[SLOTS];
static _Atomic uint64_t epoch = 1;
static vgpu_spin filling;
static atomic_uint made;

void vgpu_parameters_forget(void) {
    atomic_store(&filling, 0);
    atomic_fetch_add(&epoch, 1);
}

void vgpu_parameters_stale(void) {
    atomic_fetch_add(&epoch, 1);
}

/* What takes a handle of a function also takes one of a kernel (cuda.h, cuLaunchKernel); what asks about them does not. */
static CUresult info(CUfunction function, size_t index, size_t *offset, size_t *size) {
    CUresult result = DRIVER(cuFuncGetParamInfo) ? DRIVER(cuFuncGetParamInfo)(function, index, offset, size) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_ERROR_INVALID_HANDLE && DRIVER(cuKernelGetParamInfo))
        result = DRIVER(cuKernelGetParamInfo)((CUkernel)function, index, offset, size);
    return result;
}

static void read(struct vgpu_parameters *parameters) {
    size_t offset, size;
    for (size_t i = 0; i < MOST_PARAMETERS && info(parameters->function, i, &offset, &size) == CUDA_SUCCESS; i++)
        for (size_t at = (8 - offset % 8) % 8; at + 8 <= size && parameters->count < VGPU_PARAMETER_WORDS; at += 8) {
            parameters->words[parameters->count].parameter = (uint16_t)i;
            parameters->words[parameters->count++].offset = (uint16_t)at;
        }
}

static const struct vgpu_parameters *ask(CUfunction function, unsigned slot) {
    const int kept = errno;
    const uint64_t now = atomic_load(&epoch);
    struct vgpu_parameters asked = {.function = function, .epoch = now}, *entry = NULL;
    if (atomic_load_explicit(&made, memory_order_relaxed) >= MOST)
        return NULL;
    read(&asked);
    vgpu_spin_lock(&filling);
    if ((entry = malloc(sizeof *entry)) != NULL) {
        atomic_fetch_add(&made, 1);
        *entry = asked;
        unsigned at = slot;
        for (unsigned i = 0; i < TRIES; i++) {
            const struct vgpu_parameters *there = atomic_load(&slots[(slot + i) % SLOTS]);
            if (!there || there->epoch != now || there->function == function) {
                at = (slot + i) % SLOTS;
                break;
            }
        }
        atomic_store_explicit(&slots[at], entry, memory_order_release);
    }
    vgpu_spin_unlock(&filling);
    errno = kept;
    return entry;
}

const struct vgpu_parameters *vgpu_parameters_of(CUfunction function) {
    const unsigned slot = (unsigned)((uint64_t)(uintptr_t)function * 0x9e3779b97f4a7c15ull >> 52) % SLOTS;
    const uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);
    for (unsigned i = 0; i < TRIES; i++) {
        const struct vgpu_parameters *there = atomic_load_explicit(&slots[(slot + i) % SLOTS], memory_order_acquire);
        if (!there)
            break;
        if (there->function == function && there->epoch == now)
            return there;
    }
    return ask(function, slot);
}
