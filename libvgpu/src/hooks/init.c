/* Start of the driver interface and look-up of its entry points. */
#define _GNU_SOURCE
#include <errno.h>

#include "base/log.h"
#include "gate/gate.h"
#include "ledger/charge.h"

/* Before there is a context, and so before anything is handed in. */
CUresult cuInit(unsigned int flags) {
    CUDA_REAL(cuInit);
    if (vgpu_enforcement() == VGPU_BROKEN)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (limits && limits->flags & VGPU_OVERSUBSCRIBE && !vgpu_gate_is_armed())
        vgpu_gate_arm();
    return real(flags);
}

/* The pointer that the driver answers decides, not the name: so every version and stream meaning keeps its own
 * interface. */
static void *hooked(const char *name, void *address) {
    void *hook = vgpu_driver_hook_of(address);
    if (hook || !vgpu_hook_base(name))
        return hook ? hook : address;
    int kept = errno;
    vgpu_driver_learn_versions();
    hook = vgpu_driver_hook_of(address);
    if (!hook) {
        /* A hole: newer than what is hooked here. It must be seen, not filled by guessing its interface. */
        if (vgpu_enforcement() == VGPU_REGION || vgpu_enforcement() == VGPU_PRIVATE)
            atomic_fetch_add(&vgpu_mapping()->usage->unhooked, 1);
        vgpu_log(VGPU_LOG_WARNING, "no hook for what the driver answers to cuGetProcAddress(\"%s\")", name);
    }
    errno = kept;
    return hook ? hook : address;
}

/* Learned addresses come from dlsym on the driver library, which a program that got all its entry points by
 * cuGetProcAddress never called. */
static void learn_symbols(void) {
    DRIVER(cuInit);
}

/* The driver's own address never stands where the program's other threads could read it. */
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
    void *found = pfn ? *pfn : NULL; /* a driver may leave it alone */
    CUresult result = real(symbol, pfn ? &found : NULL, version, flags, status);
    answer(result, symbol, found, pfn);
    return result;
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    CUDA_REAL(cuGetProcAddress);
    void *found = pfn ? *pfn : NULL; /* a driver may leave it alone */
    CUresult result = real(symbol, pfn ? &found : NULL, version, flags);
    answer(result, symbol, found, pfn);
    return result;
}
