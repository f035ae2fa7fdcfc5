/* Short locks of this process. A forked child starts with all of them free: see fork.h. */
#ifndef VGPU_SPIN_H
#define VGPU_SPIN_H
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef atomic_uint vgpu_spin;

static inline bool vgpu_spin_try(vgpu_spin *lock) {
    return atomic_load_explicit(lock, memory_order_relaxed) == 0 && atomic_exchange_explicit(lock, 1, memory_order_acquire) == 0;
}

static inline void vgpu_spin_lock(vgpu_spin *lock) {
    for (unsigned tries = 0; !vgpu_spin_try(lock); tries++) {
        if (tries >= 64) {
            sched_yield(); /* its holder may wait for this very processor */
            tries = 0;
        }
    }
}

static inline void vgpu_spin_unlock(vgpu_spin *lock) {
    atomic_store_explicit(lock, 0, memory_order_release);
}
#endif
