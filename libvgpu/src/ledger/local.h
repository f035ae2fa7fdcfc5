/* What one process keeps about itself, in memory that the kernel empties in a forked child. So the child is not
 * attached, has no slot, and finds every lock open, no matter how it was made (fork, _Fork, raw clone). */
#ifndef VGPU_LOCAL_H
#define VGPU_LOCAL_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/lock.h"
#include "base/spin.h"
#include "region/slots.h"

struct vgpu_local {
    _Atomic uint32_t attached; /* enum vgpu_mode + 1; 0: not yet */
    _Atomic uint32_t enforced; /* the same after CUDA_DISABLE_CONTROL (vgpu_enforcement); 0: not yet decided */
    bool begun;                /* what the parent left in static memory has been dropped; under `setting_up` */
    _Atomic int owner_pid;     /* only on kernels without MADV_WIPEONFORK; 0: the kernel empties this memory */
    _Atomic uint32_t has_slot; /* the lanes may be used */
    vgpu_lock setting_up;      /* attaching, taking a slot, copying limits */
    vgpu_lock reaping;
    _Atomic uint64_t last_reap_ns;
    struct vgpu_member member;
    struct {
        vgpu_spin busy; /* never held across a driver call */
    } __attribute__((aligned(VGPU_CACHE_LINE))) lanes[VGPU_LANES];
};

extern _Atomic(struct vgpu_local *) vgpu_local_memory;
struct vgpu_local *vgpu_local_slowly(void);

/* The calling process's own memory; NULL only if the machine has no memory left. Cheap. */
static inline struct vgpu_local *vgpu_local(void) {
    struct vgpu_local *mine = atomic_load_explicit(&vgpu_local_memory, memory_order_acquire);
    if (__builtin_expect(!mine || atomic_load_explicit(&mine->owner_pid, memory_order_relaxed) != 0, 0))
        return vgpu_local_slowly();
    return mine;
}
#endif
