/* Spin locks between processes that survive the death of their holder at any instruction.
 *
 * A waiter that has seen the same acquisition for a while checks whether the holder still lives. It checks the lock on
 * the holder's process file (valid across pid namespaces). Inside one pid namespace it also checks the thread itself,
 * because a fork may keep the file's lock alive. A process that takes a lock over recounts what the lock guards. Where
 * it cannot recount, the steps are written so that running them twice gives the same result. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/state.h"

#define SPINS_BEFORE_YIELD 200
#define SPINS_BEFORE_LOOK 400
#define STALL_NS 1000000000ull /* last resort: no thread holds a lock for a second */

#define NESTED 32 /* one time lock per card, and some more */
static __thread struct {
    uint32_t thread, count, depth;
    uint64_t held[NESTED]; /* words of the locks that this thread holds; the last one taken is released first */
} me __attribute__((tls_model("initial-exec")));

uint64_t sim_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t sim_wall_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* word: count (31 bits) | thread (22 bits: the kernel's largest pid_max) | slot + 1 (11 bits) */
static uint64_t my_word(const struct sim *sim) {
    if (!me.thread)
        me.thread = (uint32_t)syscall(SYS_gettid);
    me.count = (me.count + 1) & 0x7fffffff;
    uint64_t place = sim->self ? sim->slot + 1 : 0;
    return (uint64_t)me.count << 33 | (uint64_t)(me.thread & 0x3fffff) << 11 | place;
}

static bool thread_gone(uint32_t thread) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%u/stat", thread);
    FILE *file = fopen(path, "re");
    if (!file)
        return true;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *state = strrchr(text, ')');
    return state && (state[2] == 'Z' || state[2] == 'X');
}

static bool holder_dead(struct sim *sim, uint64_t word) {
    uint32_t place = word & 0x7ff;
    uint32_t thread = (uint32_t)(word >> 11) & 0x3fffff;
    if (!place)
        return thread_gone(thread);
    if (!sim_alive(sim, place - 1))
        return true;
    struct sim_process *holder = sim_peer(sim, place - 1);
    struct stat ns;
    bool same = holder && stat("/proc/self/ns/pid", &ns) == 0 && holder->pid_namespace == ns.st_ino;
    return same && thread_gone(thread);
}

bool sim_acquire(struct sim *sim, sim_lock *lock) {
    uint64_t mine = my_word(sim), expected = 0;
    me.held[me.depth++ % NESTED] = mine;
    if (atomic_compare_exchange_strong_explicit(lock, &expected, mine, memory_order_acquire, memory_order_relaxed))
        return false;
    uint64_t watched = expected, since = 0;
    for (unsigned spins = 1;; spins++) {
        uint64_t word = atomic_load_explicit(lock, memory_order_relaxed);
        if (!word) {
            if (atomic_compare_exchange_strong_explicit(lock, &word, mine, memory_order_acquire, memory_order_relaxed))
                return false;
            continue;
        }
        if (word != watched) {
            watched = word;
            since = 0;
            spins = 1;
        }
        if (spins % SPINS_BEFORE_YIELD == 0)
            sched_yield();
        if (spins % SPINS_BEFORE_LOOK)
            continue;
        uint64_t now = sim_now();
        if (!since)
            since = now;
        if ((holder_dead(sim, word) || now - since > STALL_NS) &&
            atomic_compare_exchange_strong_explicit(lock, &word, mine, memory_order_acquire, memory_order_relaxed))
            return true;
    }
}

void sim_release(sim_lock *lock) {
    /* a thread may have been stopped so long that the lock was taken from it: then it must not release the new holder's
     * lock */
    uint64_t mine = me.held[--me.depth % NESTED];
    if (atomic_load_explicit(lock, memory_order_relaxed) == mine)
        atomic_store_explicit(lock, 0, memory_order_release);
}
