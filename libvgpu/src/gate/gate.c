/* Opens and closes the gate in front of all work for a card. */
#define _GNU_SOURCE
#include "gate/gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/spin.h"
#include "ledger/charge.h"

#define PASSAGES 32    /* allocated together */
#define SPUN_NS 50000u /* after this time, the thread that closes the gate sleeps between two checks */

atomic_bool vgpu_gate_armed;
_Atomic uint32_t vgpu_gate_state;
_Atomic(struct vgpu_passage *) vgpu_passages;
__thread __attribute__((tls_model("initial-exec"))) struct vgpu_passage *vgpu_passage;

/* Calls of threads that have no passage. */
static atomic_uint strangers;
static vgpu_spin making, closing;
static __thread __attribute__((tls_model("initial-exec"))) bool closer;

/* After the fork only the forking thread lives on, in its own passage or in none. */
void vgpu_gate_forget(void) {
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage; passage = passage->next) {
        atomic_store(&passage->inside, 0);
        atomic_store(&passage->handed_in, 0);
        atomic_store(&passage->finished, 0);
        atomic_store(&passage->going, 0);
        atomic_store(&passage->taken, passage == vgpu_passage);
        passage->epoch = 0;
        passage->noted = 0;
    }
    atomic_fetch_and(&vgpu_gate_state, ~VGPU_GATE_CLOSED);
    atomic_store(&strangers, 0);
    atomic_store(&making, 0);
    atomic_store(&closing, 0);
    closer = false;
    if (vgpu_gate_is_armed())
        vgpu_gate_arm();
}

void vgpu_gate_arm(void) {
    const int kept = errno;
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0)
        atomic_fetch_or(&vgpu_gate_state, VGPU_GATE_FENCED);
    atomic_store(&vgpu_gate_armed, true);
    errno = kept;
}

/* Weak: before glibc 2.34 these functions are in libpthread, and this library must not load libpthread into programs
 * without threads. */
#pragma weak pthread_key_create
#pragma weak pthread_setspecific
static pthread_key_t ending;

static void give_back(void *passage) {
    struct vgpu_passage *mine = passage;
    vgpu_passage = NULL;
    /* the thread may end in the middle of a call: cancelled, or by a callback */
    atomic_store_explicit(&mine->inside, 0, memory_order_release);
    atomic_store_explicit(&mine->taken, 0, memory_order_release);
}

/* Lets pthreads call give_back when the thread ends. The first thread makes the key. If another thread comes before the
 * key exists, its passage is not reused. */
static void announce_end(struct vgpu_passage *mine) {
    static atomic_int state; /* 0: no key yet, 1: a thread is making it, or making it failed, 2: the key exists */
    int none = 0;
    if (pthread_key_create && pthread_setspecific && atomic_compare_exchange_strong(&state, &none, 1) &&
        pthread_key_create(&ending, give_back) == 0)
        atomic_store(&state, 2);
    if (atomic_load(&state) == 2)
        pthread_setspecific(ending, mine);
}

static struct vgpu_passage *claim(void) {
    for (struct vgpu_passage *passage = atomic_load_explicit(&vgpu_passages, memory_order_acquire); passage;
         passage = passage->next) {
        uint32_t free = 0;
        if (atomic_load_explicit(&passage->taken, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong(&passage->taken, &free, 1))
            return passage;
    }
    return NULL;
}

static void make_more(void) {
    struct vgpu_passage *made =
        mmap(NULL, PASSAGES * sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return;
    struct vgpu_passage *first = atomic_load(&vgpu_passages);
    for (int i = 0; i < PASSAGES; i++)
        made[i].next = i + 1 < PASSAGES ? &made[i + 1] : first;
    atomic_store_explicit(&vgpu_passages, made, memory_order_release);
}

struct vgpu_passage *vgpu_passage_of_nobody(void) {
    const int kept = errno;
    struct vgpu_passage *made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    errno = kept;
    if (made == MAP_FAILED)
        return NULL;
    made->taken = VGPU_PASSAGE_OF_NOBODY;
    made->shared = true;
    vgpu_spin_lock(&making);
    made->next = atomic_load(&vgpu_passages);
    atomic_store_explicit(&vgpu_passages, made, memory_order_release);
    vgpu_spin_unlock(&making);
    return made;
}

struct vgpu_passage *vgpu_passage_take(void) {
    if (vgpu_passage)
        return vgpu_passage;
    const int kept = errno;
    vgpu_own_tables();
    struct vgpu_passage *mine = claim();
    if (!mine) {
        vgpu_spin_lock(&making);
        mine = claim();
        if (!mine)
            make_more();
        vgpu_spin_unlock(&making);
        if (!mine)
            mine = claim();
    }
    if (mine) {
        mine->epoch = 0;
        mine->shared = atomic_load(&mine->handed_in) != atomic_load(&mine->finished);
        announce_end(mine);
    }
    vgpu_passage = mine;
    errno = kept;
    return mine;
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, timeout, NULL, 0);
}

/* Waits until the gate is open. Checks again every 10 ms: in a child that was forked while the gate was closed, no
 * thread would wake the caller. */
static void await_open(void) {
    const struct timespec while_ = {.tv_nsec = 10000000};
    vgpu_own_tables();
    for (uint32_t state; (state = atomic_load(&vgpu_gate_state)) & VGPU_GATE_CLOSED;) {
        futex(&vgpu_gate_state, FUTEX_WAIT, state, &while_);
        vgpu_own_tables();
    }
}

void vgpu_gate_wait(struct vgpu_passage *mine, uint32_t depth) {
    const int kept = errno;
    if (!mine)
        mine = vgpu_passage_take();
    while (true) {
        if (mine)
            atomic_store(&mine->inside, depth + 1);
        else
            atomic_fetch_add(&strangers, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (depth || closer || !(atomic_load(&vgpu_gate_state) & VGPU_GATE_CLOSED))
            break;
        if (mine)
            atomic_store(&mine->inside, 0);
        else
            atomic_fetch_sub(&strangers, 1);
        await_open();
    }
    errno = kept;
}

void vgpu_gate_leave_strangely(void) {
    unsigned count = atomic_load(&strangers);
    while (count && !atomic_compare_exchange_weak(&strangers, &count, count - 1))
        ;
}

bool vgpu_gate_inside(void) {
    return closer || (vgpu_passage && atomic_load_explicit(&vgpu_passage->inside, memory_order_relaxed));
}

static bool anybody_inside(void) {
    if (atomic_load(&strangers))
        return true;
    for (struct vgpu_passage *passage = atomic_load_explicit(&vgpu_passages, memory_order_acquire); passage;
         passage = passage->next)
        if (atomic_load_explicit(&passage->inside, memory_order_acquire))
            return true;
    return false;
}

bool vgpu_gate_close(uint64_t patience_ns) {
    if (vgpu_gate_inside() || !vgpu_spin_try(&closing))
        return false;
    const int kept = errno;
    const uint32_t before = atomic_fetch_or(&vgpu_gate_state, VGPU_GATE_CLOSED);
    closer = true;
    bool ordered = before & VGPU_GATE_FENCED || syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0;
    atomic_thread_fence(memory_order_seq_cst);
    const uint64_t until = vgpu_now_ns() + patience_ns;
    bool empty = ordered && !anybody_inside();
    for (uint64_t now = until - patience_ns, begin = now; ordered && !empty && now < until; now = vgpu_now_ns()) {
        if (now - begin < SPUN_NS)
            sched_yield();
        else
            vgpu_sleep_until(now + SPUN_NS);
        empty = !anybody_inside();
    }
    /* membarrier fails from now on, for example because a seccomp filter was added later: do not call it again */
    if (!ordered)
        atomic_fetch_or(&vgpu_gate_state, VGPU_GATE_FENCED);
    if (!empty)
        vgpu_gate_open();
    errno = kept;
    return empty;
}

void vgpu_gate_open(void) {
    const int kept = errno;
    closer = false;
    atomic_fetch_and(&vgpu_gate_state, ~VGPU_GATE_CLOSED);
    futex(&vgpu_gate_state, FUTEX_WAKE, INT32_MAX, NULL);
    vgpu_spin_unlock(&closing);
    errno = kept;
}
