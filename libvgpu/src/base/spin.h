/* Locks of this process for a few instructions: never held during a driver call or a call that may wait (use lock.h
 * there). In a forked child all of them start free: see ledger/process.h. */
#ifndef VGPU_SPIN_H
#define VGPU_SPIN_H
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef atomic_uint vgpu_spin;

/* Pause between two checks of a value that another thread will change. After some pauses it sleeps, because a real-time
 * thread never yields to a thread of a lower class, which may be that other thread. It sleeps by system call:
 * nanosleep() would end a cancelled thread while it holds locks. */
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
            vgpu_yield(&looks); /* the holder may be waiting for this processor */
}

static inline void vgpu_spin_unlock(vgpu_spin *lock) {
    atomic_store_explicit(lock, 0, memory_order_release);
}
#endif
