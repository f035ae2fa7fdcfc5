/* The gate, hammered by threads that go through it, another one that closes it, and forks: prints nothing and ends with
 * 0, or names the check that failed. `gate_units fenced`: with a kernel that knows no membarrier. */
#define _GNU_SOURCE
#include "gate/gate.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "check.h"
#include "ledger/charge.h"

#define THREADS 4
#define CLOSINGS 500
#define PATIENCE_NS 50000000u

/* The process is limited, and a child forgets its parent when it first asks. */
_Atomic(struct vgpu_local *) vgpu_local_memory;
static int process;

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

enum vgpu_mode vgpu_enforcement_slowly(void) {
    if (process != (int)syscall(SYS_getpid)) {
        process = (int)syscall(SYS_getpid);
        vgpu_gate_forget();
    }
    return VGPU_REGION;
}

/* What only somebody behind the closed gate may change, and only somebody in it may read. */
static uint64_t left, right;
static atomic_bool over;
static _Atomic uint64_t passes;

static void *pass(void *unused) {
    uint64_t passed = 0;
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        vgpu_gate_enter();
        CHECK(left == right);
        if (passed % 7 == 0) {
            vgpu_gate_enter(); /* the driver calls the program back */
            CHECK(left == right && vgpu_gate_inside());
            vgpu_gate_leave();
        }
        CHECK(left == right);
        vgpu_gate_leave();
        passed++;
        atomic_fetch_add_explicit(&passes, 1, memory_order_relaxed);
    }
    return unused;
}

static void check_a_closed_gate_keeps_everybody_out(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, pass, NULL) == 0);
    uint64_t closed = 0;
    while (closed < CLOSINGS || atomic_load_explicit(&passes, memory_order_relaxed) < 100 * CLOSINGS) {
        if (!vgpu_gate_close(PATIENCE_NS))
            continue;
        left = ++closed;
        for (volatile int i = 0; i < 100; i++)
            ;
        right = closed;
        vgpu_gate_open();
    }
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

static void *stay(void *steps) {
    atomic_int *step = steps;
    vgpu_gate_enter();
    atomic_store(step, 1);
    while (!(atomic_load(&vgpu_gate_state) & VGPU_GATE_CLOSED) || atomic_load(step) == 1)
        sched_yield();
    vgpu_gate_enter(); /* while it is being closed: must not wait for whoever waits for us */
    vgpu_gate_leave();
    vgpu_gate_leave();
    return NULL;
}

static void check_somebody_inside_is_not_waited_for_long(void) {
    pthread_t thread;
    atomic_int step = 0;
    CHECK(pthread_create(&thread, NULL, stay, &step) == 0);
    while (!atomic_load(&step))
        sched_yield();
    CHECK(!vgpu_gate_close(1000));
    CHECK(!(atomic_load(&vgpu_gate_state) & VGPU_GATE_CLOSED));
    atomic_store(&step, 2);
    CHECK(vgpu_gate_close(100 * PATIENCE_NS)); /* it leaves at once */
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!vgpu_gate_close(PATIENCE_NS)); /* nobody closes it twice */
    vgpu_gate_enter();                    /* who has closed it may go through */
    vgpu_gate_leave();
    vgpu_gate_open();
    vgpu_gate_enter();
    CHECK(!vgpu_gate_close(PATIENCE_NS));
    vgpu_gate_leave();
}

static void *pass_once(void *unused) {
    vgpu_gate_enter();
    vgpu_gate_leave();
    return unused;
}

static unsigned count_passages(void) {
    unsigned count = 0;
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage; passage = passage->next)
        count++;
    return count;
}

static void check_passages_are_used_again(void) {
    const unsigned before = count_passages();
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, pass_once, NULL) == 0);
        pthread_join(thread, NULL);
    }
    CHECK(count_passages() == before);
}

static void *end_inside(void *unused) {
    vgpu_gate_enter(); /* as who is called back by the driver, and ends there */
    return unused;
}

static void check_a_thread_may_end_inside(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, end_inside, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK(vgpu_gate_close(PATIENCE_NS));
    vgpu_gate_open();
}

#ifndef __SANITIZE_THREAD__
static void *keep_closed(void *steps) {
    atomic_int *step = steps;
    CHECK(vgpu_gate_close(PATIENCE_NS));
    atomic_store(step, 1);
    while (atomic_load(step) == 1)
        sched_yield();
    vgpu_gate_open();
    return NULL;
}

/* Forked while another thread has closed the gate, and from inside it. */
static void check_a_child_starts_with_an_open_gate(void) {
    pthread_t closer;
    atomic_int step = 0;
    CHECK(pthread_create(&closer, NULL, keep_closed, &step) == 0);
    while (!atomic_load(&step))
        sched_yield();
    pid_t child = fork();
    if (!child) {
        pthread_t thread;
        alarm(10);
        /* for this one it is closed, until it asks who it is */
        CHECK(pthread_create(&thread, NULL, pass_once, NULL) == 0);
        pthread_join(thread, NULL);
        CHECK(vgpu_gate_close(PATIENCE_NS));
        vgpu_gate_open();
        exit(0);
    }
    atomic_store(&step, 2);
    pthread_join(closer, NULL);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    vgpu_gate_enter();
    child = fork();
    if (!child) {
        alarm(10);
        vgpu_own_tables();
        vgpu_gate_leave();
        CHECK(vgpu_gate_close(PATIENCE_NS));
        vgpu_gate_open();
        exit(0);
    }
    vgpu_gate_leave();
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

#endif

static void forbid_membarrier(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int count, char **words) {
    process = (int)syscall(SYS_getpid);
    const bool fenced = count > 1 && strcmp(words[1], "fenced") == 0;
    if (fenced)
        forbid_membarrier();
    vgpu_gate_arm();
    CHECK(!!(atomic_load(&vgpu_gate_state) & VGPU_GATE_FENCED) == fenced);
    check_a_closed_gate_keeps_everybody_out();
    check_somebody_inside_is_not_waited_for_long();
    check_passages_are_used_again();
    check_a_thread_may_end_inside();
#ifndef __SANITIZE_THREAD__ /* which allows no threads after a fork beside threads */
    check_a_child_starts_with_an_open_gate();
#endif
    return 0;
}
