/* Locks of this process that may be held during driver calls: a waiting thread sleeps. In a forked child all of them
 * start free (ledger/process.h). A pthread_mutex_t cannot do that: its forked copy belongs to a thread that does not
 * exist in the child. */
#ifndef VGPU_LOCK_H
#define VGPU_LOCK_H
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef atomic_uint vgpu_lock; /* 0: free; 1: held; 2: held, and a thread may be waiting */

static inline bool vgpu_lock_try(vgpu_lock *lock) {
    unsigned none = 0;
    return atomic_compare_exchange_strong_explicit(lock, &none, 1, memory_order_acquire, memory_order_relaxed);
}

static inline void vgpu_lock_take(vgpu_lock *lock) {
    if (__builtin_expect(vgpu_lock_try(lock), 1))
        return;
    const int kept = errno;
    while (atomic_exchange_explicit(lock, 2, memory_order_acquire) != 0)
        syscall(SYS_futex, lock, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    errno = kept;
}

static inline void vgpu_lock_release(vgpu_lock *lock) {
    if (__builtin_expect(atomic_exchange_explicit(lock, 0, memory_order_release) == 1, 1))
        return;
    const int kept = errno;
    syscall(SYS_futex, lock, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    errno = kept;
}
#endif
