/* Makes the memory that the kernel empties in a forked child. */
#define _GNU_SOURCE
#include "ledger/local.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18 /* Linux 4.14, madvise(2) */
#endif

_Atomic(struct vgpu_local *) vgpu_local_memory;

static struct vgpu_local *make(void) {
    struct vgpu_local *other = NULL;
    struct vgpu_local *mine = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED)
        return NULL;
    if (madvise(mine, sizeof *mine, MADV_WIPEONFORK) != 0)
        atomic_store(&mine->owner_pid, getpid());
    if (atomic_compare_exchange_strong(&vgpu_local_memory, &other, mine))
        return mine;
    munmap(mine, sizeof *mine);
    return other;
}

struct vgpu_local *vgpu_local_slowly(void) {
    struct vgpu_local *mine = atomic_load_explicit(&vgpu_local_memory, memory_order_acquire);
    if (!mine)
        return make();
    const int self = getpid();
    if (atomic_load_explicit(&mine->owner_pid, memory_order_relaxed) != self) {
        memset(mine, 0, sizeof *mine); /* a fresh child has one thread */
        atomic_store(&mine->owner_pid, self);
    }
    return mine;
}
