/* The driver below: its functions by number, and which of its entry points have a hook. */
#ifndef VGPU_DRIVER_H
#define VGPU_DRIVER_H
#include <stdatomic.h>
#include <stdbool.h>

/* Declares all versions of the driver interface under their exported names (without renaming to the newest version). */
#define __CUDA_API_VERSION_INTERNAL
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <cuda.h>
#include <nvml.h>
/* cuda.h declares these only for programs with the per-thread default stream. */
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

/* The driver's own function; NULL: there is no driver library, or it lacks the function. Opens the library if it is not
 * open yet. */
static inline void *vgpu_driver_entry(enum vgpu_entry entry) {
    void *function = atomic_load_explicit(&vgpu_driver_entries[entry], memory_order_acquire);
    return __builtin_expect(function != NULL, 1) ? function : vgpu_driver_entry_slowly(entry);
}
#define DRIVER(symbol) ((__typeof__(&symbol))vgpu_driver_entry(ENTRY_##symbol))

/* A hook returns this if DRIVER is NULL. */
CUresult vgpu_no_cuda(void);
nvmlReturn_t vgpu_no_nvml(void);

/* Declares `real`, the driver's own `symbol`, or returns from the hook with the error that there is no driver. */
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
/* Records that `address` is the driver's function behind a hook. */
void vgpu_driver_learn(int hook, void *address);
/* The hook of a recorded driver function; NULL: none. */
void *vgpu_driver_hook_of(const void *address);
/* Asks the driver's cuGetProcAddress once for every version and stream meaning of the hooked names, and records the
 * answers. */
void vgpu_driver_learn_versions(void);
#endif
