/* Hooks of fills and copies. If the driver makes them with the card's multiprocessors, they keep kernels waiting. Then
 * they are paced like kernels, by measured time. NVIDIA publishes little about this. Fills count as work of the
 * multiprocessors, because unknown work is charged. Copies within a card do not, because NVIDIA says that copy engines
 * make them (cuda-samples issue 31). The limits of a node can override both. */
#ifndef VGPU_MEASURED_H
#define VGPU_MEASURED_H
#include "hooks/gated.h"
#include "ledger/charge.h"
#include "ledger/ledger.h"
#include "pacer/pacer.h"
#include "pacer/prepaid.h"
#include "vgpu/region.h"

/* These addresses stand for fills and copies in the keys of costs; no function of a program has them. */
static const char vgpu_fill_work = 0, vgpu_copy_work = 0;

static inline bool vgpu_fills_are_paced(void) {
    const struct vgpu_limits *limits = vgpu_enforcement() == VGPU_UNLIMITED ? NULL : vgpu_limits_now();
    return limits && !(limits->flags & VGPU_FILLS_ON_ENGINE);
}

static inline bool vgpu_on_a_card(CUdeviceptr address) {
    __typeof__(&cuPointerGetAttribute) ask = DRIVER(cuPointerGetAttribute);
    unsigned type = 0;
    return ask && ask(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
}

/* For a copy between two addresses: only engines copy from or to host memory. */
static inline bool vgpu_copy_is_paced(CUdeviceptr to, CUdeviceptr from) {
    const struct vgpu_limits *limits = vgpu_enforcement() == VGPU_UNLIMITED ? NULL : vgpu_limits_now();
    return limits && limits->flags & VGPU_COPIES_ON_SMS && vgpu_on_a_card(to) && vgpu_on_a_card(from);
}

/* As GATED_CALLING. `paced`: whether this call is paced; `key`: the key of equally long work. */
#define MEASURED_CALLING(symbol, parameters, arguments, stream, paced, key, call)                                      \
    static __attribute__((noinline)) CUresult measured_##symbol parameters {                                           \
        CUDA_REAL(symbol);                                                                                             \
        const bool gated = vgpu_gate_is_armed();                                                                       \
        struct vgpu_launch launch = {.counted = false};                                                                \
        if (gated)                                                                                                     \
            vgpu_safe_point();                                                                                         \
        if ((paced) && !(gated ? vgpu_pacer_prepaid_gated(key, stream) : vgpu_pacer_prepaid(key, stream)) &&           \
            __builtin_expect(!vgpu_pacer_before(&launch, key, stream), 0))                                             \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        if (!gated)                                                                                                    \
            return vgpu_pacer_after(&launch, real arguments);                                                          \
        vgpu_handing_in(stream);                                                                                       \
        CUresult result = call;                                                                                        \
        vgpu_handed_in();                                                                                              \
        return vgpu_pacer_after(&launch, result);                                                                      \
    }                                                                                                                  \
    CUresult symbol parameters {                                                                                       \
        __typeof__(&symbol) direct =                                                                                   \
            (__typeof__(&symbol))atomic_load_explicit(&vgpu_driver_entries[ENTRY_##symbol], memory_order_acquire);     \
        if (__builtin_expect(!direct || !atomic_load_explicit(&vgpu_never_limited, memory_order_relaxed) ||            \
                                 vgpu_gate_is_armed(),                                                                 \
                             0))                                                                                       \
            return measured_##symbol arguments;                                                                        \
        return direct arguments;                                                                                       \
    }
#endif
