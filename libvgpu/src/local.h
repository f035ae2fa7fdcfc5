/* What one process keeps about itself, in memory that the kernel empties in a forked child: the child then finds itself not attached, with no
 * slot and with every lock open, however it was made (fork, _Fork, raw clone). */
#ifndef VGPU_LOCAL_H
#define VGPU_LOCAL_H
#include <stdatomic.h>
#include <stdint.h>

#include "slots.h"

struct vgpu_local {
    _Atomic uint32_t attached;        /* enum vgpu_mode + 1; 0: not yet */
    _Atomic uint32_t has_slot;        /* lanes may be used */
    _Atomic uint32_t setting_up;      /* lock: attaching, taking a slot, copying limits */
    _Atomic uint32_t reaping;         /* lock */
    _Atomic uint64_t last_reap_ns;
    struct vgpu_member member;
    struct {
        _Atomic uint32_t busy;        /* lock; never held across a driver call */
    } __attribute__((aligned(VGPU_CACHE_LINE))) lanes[VGPU_LANES];
};

/* The calling process's own; NULL only when the machine has no memory left. Cheap. */
struct vgpu_local *vgpu_local(void);

static inline bool vgpu_try_lock(_Atomic uint32_t *lock)
{
    return atomic_load_explicit(lock, memory_order_relaxed) == 0 && atomic_exchange_explicit(lock, 1, memory_order_acquire) == 0;
}

/* Spins a little, then gives the processor to others. Holders are running threads of this process and hold it for microseconds. */
void vgpu_lock(_Atomic uint32_t *lock);

static inline void vgpu_unlock(_Atomic uint32_t *lock)
{
    atomic_store_explicit(lock, 0, memory_order_release);
}
#endif
