#define _GNU_SOURCE
#include "fork.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* glibc's own name behind pthread_atfork (Linux Standard Base, libc): in libc itself since 2.3.2, so that the library needs no libpthread. */
int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *object);
extern void *__dso_handle __attribute__((visibility("hidden")));

static void forget_in_child(void) {
    vgpu_sizes_forget();
    vgpu_pools_forget();
    vgpu_blocks_forget();
    vgpu_samples_forget();
}

void vgpu_watch_forks(void) {
    static atomic_bool watching;
    if (!atomic_load_explicit(&watching, memory_order_relaxed) && !atomic_exchange(&watching, true))
        __register_atfork(NULL, NULL, forget_in_child, &__dso_handle);
}
