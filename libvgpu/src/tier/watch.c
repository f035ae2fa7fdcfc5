/* Runs a thread that checks whether a loan was taken back. */
#define _GNU_SOURCE
#include "tier/watch.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "gate/gate.h"
#include "gate/streams.h"
#include "tier/move.h"

#define LOOK_EVERY_NS 100000000u
#define LOOKS_WITHOUT_LOAN 100u
#define STACK_BYTES (512u << 10)
#define MOST_NS 2000000000u /* how long the end of the process waits for a check under way */

/* Weak: before glibc 2.34 these functions are in libpthread, and this library must not load libpthread into programs
 * without threads. */
#pragma weak pthread_create
#pragma weak pthread_attr_init
#pragma weak pthread_attr_setstacksize
#pragma weak pthread_attr_setdetachstate

enum { NOBODY, WATCHING, OVER };
static atomic_int state;
static atomic_bool looking;

void vgpu_watch_forget(void) {
    atomic_store(&looking, false);
    int watching = WATCHING; /* that thread belongs to the parent */
    atomic_compare_exchange_strong(&state, &watching, NOBODY);
}

/* Runs before the driver's own exit handler, which was registered earlier. */
static void stop(void) {
    const uint64_t until = vgpu_now_ns() + MOST_NS;
    atomic_store(&state, OVER);
    while (atomic_load(&looking) && vgpu_now_ns() < until)
        vgpu_sleep_until(vgpu_now_ns() + 100000u);
}

static void *watch(void *unused) {
    for (unsigned without = 0; without < LOOKS_WITHOUT_LOAN; without++) {
        vgpu_sleep_until(vgpu_now_ns() + LOOK_EVERY_NS);
        atomic_store(&looking, true);
        if (atomic_load(&state) == OVER)
            break;
        if (vgpu_give_way())
            without = 0;
        vgpu_streams_mark_late();
        atomic_store(&looking, false);
    }
    atomic_store(&looking, false);
    int watching = WATCHING;
    atomic_compare_exchange_strong(&state, &watching, NOBODY);
    return unused;
}

static bool start(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (!pthread_create || !pthread_attr_init || !pthread_attr_setstacksize || !pthread_attr_setdetachstate ||
        pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before); /* signals of the program must go to its own threads */
    const bool made = pthread_create(&thread, &attributes, watch, NULL) == 0;
    sigprocmask(SIG_SETMASK, &before, NULL);
    return made;
}

bool vgpu_watching_loans(void) {
    return atomic_load_explicit(&state, memory_order_relaxed) != NOBODY;
}

void vgpu_watch_loans(void) {
    static atomic_bool announced;
    int nobody = NOBODY;
    if (vgpu_watching_loans() || !atomic_compare_exchange_strong(&state, &nobody, WATCHING))
        return;
    const int kept = errno;
    if ((!atomic_exchange(&announced, true) && atexit(stop) != 0) || !start())
        /* no exit handler could stop the thread, or the machine allows no thread: do not try again */
        atomic_store(&state, OVER);
    errno = kept;
}
