/* Start of the driver interface and lookup of its entry points. */
#define _GNU_SOURCE
#include <errno.h>

#include "base/log.h"
#include "gate/gate.h"
#include "ledger/charge.h"

/* Arms the gate here: before a context exists, and so before any work is handed in. */
CUresult cuInit(unsigned int flags) {
    CUDA_REAL(cuInit);
    if (vgpu_enforcement() == VGPU_BROKEN)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (limits && limits->flags & VGPU_OVERSUBSCRIBE && !vgpu_gate_is_armed())
        vgpu_gate_arm();
    return real(flags);
}

/* The driver's pointer decides, not the name, so that every version and stream meaning keeps its own interface. */
static void *hooked(const char *name, void *address) {
    void *hook = vgpu_driver_hook_of(address);
    if (hook || !vgpu_hook_base(name))
        return hook ? hook : address;
    int kept = errno;
    vgpu_driver_learn_versions();
    hook = vgpu_driver_hook_of(address);
    if (!hook) {
        /* A gap: an entry point newer than all hooks. It is reported, because guessing its interface would be wrong. */
        if (vgpu_enforcement() == VGPU_REGION || vgpu_enforcement() == VGPU_PRIVATE)
            atomic_fetch_add(&vgpu_mapping()->usage->unhooked, 1);
        vgpu_log(VGPU_LOG_WARNING, "no hook for what the driver answers to cuGetProcAddress(\"%s\")", name);
    }
    errno = kept;
    return hook ? hook : address;
}

/* Learns addresses by dlsym on the driver library: a program that gets all its entry points by cuGetProcAddress never
 * calls dlsym there. */
static void learn_symbols(void) {
    DRIVER(cuInit);
}

/* Writes to `pfn` only at the end, so that no other thread can read the driver's own address there. */
static void answer(CUresult result, const char *symbol, void *found, void **pfn) {
    if (result == CUDA_SUCCESS && symbol && found) {
        learn_symbols();
        found = hooked(symbol, found);
    }
    if (pfn)
        *pfn = found;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    CUDA_REAL(cuGetProcAddress_v2);
    void *found = pfn ? *pfn : NULL; /* a driver may leave it unchanged */
    CUresult result = real(symbol, pfn ? &found : NULL, version, flags, status);
    answer(result, symbol, found, pfn);
    return result;
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    CUDA_REAL(cuGetProcAddress);
    void *found = pfn ? *pfn : NULL; /* a driver may leave it unchanged */
    CUresult result = real(symbol, pfn ? &found : NULL, version, flags);
    answer(result, symbol, found, pfn);
    return result;
}
