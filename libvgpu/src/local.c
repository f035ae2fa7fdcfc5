#define _GNU_SOURCE
#include "local.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18 /* Linux 4.14, madvise(2) */
#endif

static _Atomic(struct vgpu_local *) local;
static _Atomic int owner_pid; /* only for kernels without MADV_WIPEONFORK; 0: the kernel does it */

static struct vgpu_local *make(void)
{
    struct vgpu_local *other = NULL;
    struct vgpu_local *mine = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED)
        return NULL;
    if (madvise(mine, sizeof *mine, MADV_WIPEONFORK) != 0)
        atomic_store(&owner_pid, getpid());
    if (atomic_compare_exchange_strong(&local, &other, mine))
        return mine;
    munmap(mine, sizeof *mine);
    return other;
}

struct vgpu_local *vgpu_local(void)
{
    struct vgpu_local *mine = atomic_load_explicit(&local, memory_order_acquire);
    if (__builtin_expect(!mine, 0))
        return make();
    const int owner = atomic_load_explicit(&owner_pid, memory_order_relaxed);
    if (__builtin_expect(owner != 0, 0) && owner != getpid()) {
        memset(mine, 0, sizeof *mine); /* a fresh child has one thread */
        atomic_store(&owner_pid, getpid());
    }
    return mine;
}
