/* Locks of this process for a few instructions: held neither over a call of the driver nor over one that may wait
 * (lock.h). A forked child starts with all of them free: see fork.h. */
#ifndef VGPU_SPIN_H
#define VGPU_SPIN_H
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef atomic_uint vgpu_spin;

/* Between two looks at something that another thread is about to change. After some of them it sleeps: a thread of a
 * real-time class yields to nobody of a lower class, who may be that other thread. By system call, as nanosleep() ends
 * a thread that was cancelled, amid what it holds. */
static inline void vgpu_yield(unsigned *looks) {
    const struct timespec moment = {.tv_nsec = 50000};
    if (++*looks < 64)
        sched_yield();
    else
        syscall(SYS_nanosleep, &moment, NULL);
}

static inline bool vgpu_spin_try(vgpu_spin *lock) {
    return atomic_load_explicit(lock, memory_order_relaxed) == 0 &&
           atomic_exchange_explicit(lock, 1, memory_order_acquire) == 0;
}

static inline void vgpu_spin_lock(vgpu_spin *lock) {
    unsigned looks = 0;
    for (unsigned tries = 0; !vgpu_spin_try(lock); tries++)
        if (tries % 64 == 63)
            vgpu_yield(&looks); /* its holder may wait for this very processor */
}

static inline void vgpu_spin_unlock(vgpu_spin *lock) {
    atomic_store_explicit(lock, 0, memory_order_release);
}
#endif
