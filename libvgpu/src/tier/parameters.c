/* Finds addresses in the parameters of a kernel. */
#define _GNU_SOURCE
#include "tier/parameters.h"

#include <errno.h>
#include <stdatomic.h>

#include "base/spin.h"

#define SLOTS 4096u /* power of two */
#define TRIES 4u
#define MOST_PARAMETERS 4096u

/* One thread at a time writes a slot, and `version` is odd meanwhile. A reader discards what it read if `version`
 * changed or was odd. A reader that has seen a new value (acquire) also sees a new version (each is stored with
 * release). */
static struct slot {
    _Atomic uint32_t version;
    _Atomic uint32_t count;
    _Atomic uint64_t epoch; /* another epoch than now: the slot is free */
    _Atomic(CUfunction) function;
    _Atomic uint32_t words[VGPU_PARAMETER_WORDS]; /* parameter << 16 | offset */
} slots[SLOTS];
static _Atomic uint64_t epoch = 1;
static vgpu_spin filling;

void vgpu_parameters_forget(void) {
    for (unsigned i = 0; i < SLOTS; i++) /* a slot that was being written has lost its writer */
        if (atomic_load_explicit(&slots[i].version, memory_order_relaxed) & 1)
            atomic_fetch_add(&slots[i].version, 1);
    atomic_store(&filling, 0);
    atomic_fetch_add(&epoch, 1);
}

void vgpu_parameters_stale(void) {
    atomic_fetch_add(&epoch, 1);
}

/* cuLaunchKernel takes a kernel's handle as a function, too (cuda.h); cuFuncGetParamInfo does not. */
static CUresult info(CUfunction function, size_t index, size_t *offset, size_t *size) {
    CUresult result =
        DRIVER(cuFuncGetParamInfo) ? DRIVER(cuFuncGetParamInfo)(function, index, offset, size) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_ERROR_INVALID_HANDLE && DRIVER(cuKernelGetParamInfo))
        result = DRIVER(cuKernelGetParamInfo)((CUkernel)function, index, offset, size);
    return result;
}

static void ask(CUfunction function, struct vgpu_parameters *out) {
    size_t offset, size;
    for (size_t i = 0; i < MOST_PARAMETERS && info(function, i, &offset, &size) == CUDA_SUCCESS; i++)
        for (size_t at = (8 - offset % 8) % 8; at + 8 <= size && out->count < VGPU_PARAMETER_WORDS; at += 8)
            out->words[out->count++] = (struct vgpu_parameter_word){(uint16_t)i, (uint16_t)at};
}

static struct slot *place(CUfunction function, unsigned number) {
    return &slots[(((uint64_t)(uintptr_t)function * 0x9e3779b97f4a7c15ull >> 52) + number) % SLOTS];
}

static bool find(const struct slot *slot, CUfunction function, uint64_t now, struct vgpu_parameters *out) {
    const uint32_t version = atomic_load_explicit(&slot->version, memory_order_acquire);
    if (version & 1 || atomic_load_explicit(&slot->function, memory_order_acquire) != function ||
        atomic_load_explicit(&slot->epoch, memory_order_acquire) != now)
        return false;
    out->count = atomic_load_explicit(&slot->count, memory_order_acquire);
    for (uint32_t i = 0; i < out->count && i < VGPU_PARAMETER_WORDS; i++) {
        const uint32_t word = atomic_load_explicit(&slot->words[i], memory_order_acquire);
        out->words[i] = (struct vgpu_parameter_word){(uint16_t)(word >> 16), (uint16_t)word};
    }
    return atomic_load_explicit(&slot->version, memory_order_relaxed) == version;
}

static void keep(CUfunction function, uint64_t now, const struct vgpu_parameters *asked) {
    struct slot *slot = place(function, 0);
    vgpu_spin_lock(&filling);
    for (unsigned i = 0; i < TRIES; i++)
        if (atomic_load(&place(function, i)->epoch) != now) {
            slot = place(function, i);
            break;
        }
    atomic_fetch_add(&slot->version, 1);
    atomic_store_explicit(&slot->function, function, memory_order_release);
    atomic_store_explicit(&slot->epoch, now, memory_order_release);
    atomic_store_explicit(&slot->count, asked->count, memory_order_release);
    for (uint32_t i = 0; i < asked->count; i++)
        atomic_store_explicit(&slot->words[i], (uint32_t)asked->words[i].parameter << 16 | asked->words[i].offset,
                              memory_order_release);
    atomic_fetch_add_explicit(&slot->version, 1, memory_order_release);
    vgpu_spin_unlock(&filling);
}

void vgpu_parameters_of(CUfunction function, struct vgpu_parameters *out) {
    const uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);
    for (unsigned i = 0; i < TRIES; i++)
        if (find(place(function, i), function, now, out))
            return;
    const int kept = errno;
    out->count = 0;
    ask(function, out);
    keep(function, now, out);
    errno = kept;
}
