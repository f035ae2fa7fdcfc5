/* The driver below: its functions by number, and which of its entry points a hook covers. */
#ifndef VGPU_DRIVER_H
#define VGPU_DRIVER_H
#include <stdatomic.h>
#include <stdbool.h>

/* All versions of the driver interface, with the names that the libraries export (no renaming to the newest version).
 */
#define __CUDA_API_VERSION_INTERNAL
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <cuda.h>
#include <nvml.h>
/* cuda.h declares these for programs of the per-thread default stream alone. */
CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, CUstreamCigCaptureParams *parameters);
CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream);
#pragma GCC visibility pop

enum vgpu_entry {
#define CUDA_HOOK(name, symbol, version, stream) ENTRY_##symbol,
#define NVML_HOOK(symbol) ENTRY_##symbol,
#include "loader/hooks.def"
#undef CUDA_HOOK
#undef NVML_HOOK
    VGPU_HOOK_COUNT,
    ENTRY_BEFORE_CALLS = VGPU_HOOK_COUNT - 1,
#define CUDA_CALL(symbol) ENTRY_##symbol,
#define NVML_CALL(symbol) ENTRY_##symbol,
#include "loader/calls.def"
#undef CUDA_CALL
#undef NVML_CALL
    VGPU_ENTRY_COUNT
};

extern _Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
void *vgpu_driver_entry_slowly(enum vgpu_entry entry);

/* The driver's own function; NULL when no driver library is there or it lacks the function. Opens the library when no
 * one has yet. */
static inline void *vgpu_driver_entry(enum vgpu_entry entry) {
    void *function = atomic_load_explicit(&vgpu_driver_entries[entry], memory_order_acquire);
    return __builtin_expect(function != NULL, 1) ? function : vgpu_driver_entry_slowly(entry);
}
#define DRIVER(symbol) ((__typeof__(&symbol))vgpu_driver_entry(ENTRY_##symbol))

/* What a hook answers when DRIVER is NULL. */
CUresult vgpu_no_cuda(void);
nvmlReturn_t vgpu_no_nvml(void);

/* Declares `real`, the driver's own `symbol`, or makes the hook answer that there is no driver. */
#define CUDA_REAL(symbol)                                                                                              \
    __typeof__(&symbol) real = DRIVER(symbol);                                                                         \
    if (__builtin_expect(!real, 0))                                                                                    \
    return vgpu_no_cuda()
#define NVML_REAL(symbol)                                                                                              \
    __typeof__(&symbol) real = DRIVER(symbol);                                                                         \
    if (__builtin_expect(!real, 0))                                                                                    \
    return vgpu_no_nvml()

/* Number of the hook with this exported name; -1: none. */
int vgpu_hook_number(const char *symbol);
/* True if cuGetProcAddress of this name can lead to a hooked entry point. */
bool vgpu_hook_base(const char *name);
void *vgpu_hook_function(int hook);
/* Remembers that `address` is the driver's function behind a hook. */
void vgpu_driver_learn(int hook, void *address);
/* The hook for a driver's function that was learned; NULL: none. */
void *vgpu_driver_hook_of(const void *address);
/* Asks the driver's cuGetProcAddress once for every version and stream meaning of the hooked names, and learns the
 * answers. */
void vgpu_driver_learn_versions(void);
#endif
