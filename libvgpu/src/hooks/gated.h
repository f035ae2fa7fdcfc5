/* Hooks of calls that hand work in but are neither paced nor charged. */
#ifndef VGPU_GATED_H
#define VGPU_GATED_H
#include "gate/streams.h"
#include "loader/driver.h"
#include "tier/move.h"

static inline CUstream per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/* Defines the hook `symbol`. If no block can move, the hook tests one flag and jumps to the driver's function.
 * `stream`: the stream that the driver will use. `noting`: runs inside the gate after the driver has accepted the
 * work. */
#define GATED_NOTING(symbol, parameters, arguments, stream, noting)                                                    \
    GATED_CALLING(symbol, parameters, arguments, stream, real arguments, noting)
#define GATED(symbol, parameters, arguments, stream) GATED_NOTING(symbol, parameters, arguments, stream, (void)0)
/* `call`: runs inside the gate; `real` is the driver's function. */
#define GATED_CALLING(symbol, parameters, arguments, stream, call, noting)                                             \
    static __attribute__((noinline)) CUresult gated_##symbol parameters {                                              \
        CUDA_REAL(symbol);                                                                                             \
        if (!vgpu_gate_is_armed())                                                                                     \
            return real arguments;                                                                                     \
        vgpu_safe_point();                                                                                             \
        vgpu_handing_in(stream);                                                                                       \
        CUresult result = call;                                                                                        \
        if (result == CUDA_SUCCESS)                                                                                    \
            noting;                                                                                                    \
        vgpu_handed_in();                                                                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    CUresult symbol parameters {                                                                                       \
        __typeof__(&symbol) direct =                                                                                   \
            (__typeof__(&symbol))atomic_load_explicit(&vgpu_driver_entries[ENTRY_##symbol], memory_order_acquire);     \
        if (__builtin_expect(!direct || vgpu_gate_is_armed(), 0))                                                      \
            return gated_##symbol arguments;                                                                           \
        return direct arguments;                                                                                       \
    }
#endif
