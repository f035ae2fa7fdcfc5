/* Which streams are asked whether they have finished, against a driver that is played here: prints nothing and ends
 * with 0, or names the check that failed. */
#define _GNU_SOURCE
#include "gate/streams.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "streams_driver.h"

static void check_created_streams(void) {
    begin();
    make(0);
    make(1);
    CHECK(vgpu_streams_idle());
    busy[1] = true; /* used or not: somebody may know it by another way */
    CHECK(!vgpu_streams_idle());
    use(STREAM(1));
    use(STREAM(0));
    CHECK(!vgpu_streams_idle());
    busy[1] = false;
    CHECK(vgpu_streams_idle());
    vgpu_open_captures = 1;
    CHECK(!vgpu_streams_idle());
    vgpu_open_captures = 0;
    CHECK(vgpu_streams_idle() && !warnings);
}

static void check_legacy_streams(void) {
    CUcontext popped;
    begin();
    use(NULL);
    push(CONTEXT(2));
    use(CU_STREAM_LEGACY);
    pop(&popped);
    CHECK(vgpu_streams_idle());
    legacy_busy[2] = true; /* of a context that is not current */
    CHECK(!vgpu_streams_idle());
    vgpu_streams_context_going(CONTEXT(2));
    vgpu_streams_context_went(CONTEXT(2), false); /* somebody else holds it, too */
    CHECK(!vgpu_streams_idle());
    vgpu_streams_context_going(CONTEXT(2));
    vgpu_streams_context_went(CONTEXT(2), true);
    CHECK(vgpu_streams_idle());
    legacy_busy[1] = true;
    CHECK(!vgpu_streams_idle());
    legacy_busy[1] = false;
    CHECK(vgpu_streams_idle() && !warnings);
}

/* A copy between contexts uses more than the current one's. */
static void check_default_streams_of_others(void) {
    begin();
    vgpu_handing_in(NULL);
    vgpu_default_stream_used(CONTEXT(2));
    vgpu_default_stream_used(CONTEXT(2));
    vgpu_default_stream_used(NULL);
    vgpu_handed_in();
    CHECK(vgpu_streams_idle());
    legacy_busy[2] = true;
    CHECK(!vgpu_streams_idle() && !warnings);
}

static void check_streams_of_green_contexts(void) {
    CUcontext popped;
    begin();
    exists[3] = exists[4] = true;
    vgpu_stream_made(STREAM(3), CONTEXT(2)); /* whatever cuStreamGetCtx says */
    vgpu_stream_made(STREAM(4), CONTEXT(2));
    use(STREAM(3));
    CHECK(vgpu_streams_context_idle(CONTEXT(2)) && vgpu_streams_idle());
    busy[4] = true;
    CHECK(!vgpu_streams_context_idle(CONTEXT(2)) && vgpu_streams_context_idle(CONTEXT(1)) && !vgpu_streams_idle());
    vgpu_streams_context_going(CONTEXT(2));
    vgpu_streams_context_went(CONTEXT(2), true);
    exists[3] = exists[4] = false; /* detached: the driver does not answer for them */
    CHECK(vgpu_streams_idle() && !warnings);
    vgpu_streams_lost("it had work to do");
    CHECK(!vgpu_streams_idle() && warnings == 1);
    begin();
    pop(&popped);
    vgpu_driver_entries[ENTRY_cuStreamGetCtx] = NULL;
    vgpu_stream_made(STREAM(3), NULL);
    CHECK(!vgpu_streams_idle() && warnings == 1);
    play();
}

/* Before the driver has returned from destroying one, another one may have its handle. */
static void check_contexts_with_the_handle_of_one_that_goes(void) {
    begin();
    make(0);
    busy[0] = true;
    use(NULL);
    use(CU_STREAM_PER_THREAD);
    own_busy[1] = true;
    CHECK(!vgpu_streams_idle());
    vgpu_streams_context_going(CONTEXT(1));
    own_busy[1] = busy[0] = exists[0] = false; /* the first one has gone; now the second one: */
    make(1);
    use(STREAM(1));
    use(NULL);
    vgpu_streams_context_went(CONTEXT(1), true);
    CHECK(vgpu_streams_idle());
    legacy_busy[1] = true;
    CHECK(!vgpu_streams_idle());
    legacy_busy[1] = false;
    busy[1] = true;
    CHECK(!vgpu_streams_idle());
    vgpu_streams_context_going(CONTEXT(1)); /* a third one, in which a stream has the handle of one of the second */
    make(1);
    destroy(1);
    event_busy = true;
    make(2);
    use(CU_STREAM_PER_THREAD);
    own_busy[1] = true;
    busy[1] = false;
    vgpu_streams_context_went(CONTEXT(1), true);
    CHECK(events == 1 && !vgpu_streams_idle());
    event_busy = false;
    CHECK(!vgpu_streams_idle());
    own_busy[1] = false;
    CHECK(vgpu_streams_idle() && events == 0 && !warnings);
    for (int i = 0; i < 3; i++) { /* it stays, and is in use meanwhile */
        vgpu_streams_context_going(CONTEXT(1));
        use(NULL);
        use(STREAM(2));
        vgpu_streams_context_went(CONTEXT(1), false);
    }
    busy[2] = true;
    CHECK(!vgpu_streams_idle() && !warnings);
}

static void check_destroyed_streams(void) {
    begin();
    make(0);
    make(1);
    busy[0] = true;
    destroy(0);
    event_busy = true;
    CHECK(events == 1 && !vgpu_streams_idle());
    event_busy = false;
    CHECK(vgpu_streams_idle() && events == 0 && vgpu_streams_idle());
    destroy(1); /* with nothing to do: nothing to keep in mind */
    CHECK(events == 0 && vgpu_streams_idle() && !warnings);
    for (int i = 0; i < 100; i++) { /* many of them, and nobody asks */
        event_busy = i % 40 == 39;
        make(0);
        busy[0] = true;
        destroy(0);
    }
    CHECK(events < 50);
    event_busy = false;
    CHECK(vgpu_streams_idle() && events == 0);
    make(1); /* the same handle again */
    use(STREAM(1));
    busy[1] = true;
    CHECK(!vgpu_streams_idle());
}

static void check_unknown_streams(void) {
    begin();
    use(STREAM(7)); /* none: the driver will say so */
    CHECK(vgpu_streams_idle() && !warnings);
    exists[6] = true;
    use(STREAM(6));
    CHECK(!vgpu_streams_idle() && warnings == 1);
    use(STREAM(6));
    CHECK(!vgpu_streams_idle() && warnings == 1);
    begin();
    make(5);
    use(STREAM(5));
    destroy(5);
    exists[5] = true; /* the handle comes back by a way that nobody saw, and a thread remembers it */
    use(STREAM(5));
    CHECK(!vgpu_streams_idle() && warnings == 1);
}

static bool waits;

static void *other_thread(void *unused) {
    push(CONTEXT(1));
    use(CU_STREAM_PER_THREAD);
    pthread_barrier_wait(&steps);
    pthread_barrier_wait(&steps);
    if (waits)
        vgpu_own_stream_finished();
    return unused;
}

/* Nobody but the thread itself can ask for its own stream. */
static void check_streams_of_threads(void) {
    pthread_t thread;
    struct vgpu_stream_wait wait;
    begin();
    own_busy[1] = true;
    use(CU_STREAM_PER_THREAD);
    CHECK(!vgpu_streams_idle());
    own_busy[1] = false;
    CHECK(vgpu_streams_idle());
    for (int round = 0; round < 4; round++) {
        waits = round == 0;
        pthread_create(&thread, NULL, other_thread, NULL);
        pthread_barrier_wait(&steps);
        CHECK(!vgpu_streams_idle());
        if (round == 1) { /* a wait for all of the context */
            vgpu_context_waiting(&wait, NULL);
            vgpu_context_finished(&wait);
            CHECK(vgpu_streams_idle());
        }
        if (round == 2) { /* of another one */
            vgpu_context_waiting(&wait, CONTEXT(2));
            vgpu_context_finished(&wait);
        }
        pthread_barrier_wait(&steps);
        pthread_join(thread, NULL);
        CHECK(vgpu_streams_idle() == (round < 2)); /* what a thread left behind goes on, whoever has its passage now */
    }
    vgpu_driver_entries[ENTRY_cuCtxRecordEvent] = (void *)record_context;
    others_busy = true;
    CHECK(!vgpu_streams_idle());
    others_busy = event_busy = false;
    CHECK(vgpu_streams_idle() && !warnings);
    use(CU_STREAM_PER_THREAD);
    vgpu_context_waiting(&wait, NULL);
    use(CU_STREAM_PER_THREAD); /* during the wait: not waited for */
    vgpu_context_finished(&wait);
    own_busy[1] = true;
    CHECK(!vgpu_streams_idle());
}

/* An event is asked again, not recorded anew, until it has passed. */
static void check_a_card_that_takes_time(void) {
    pthread_t thread;
    begin();
    vgpu_driver_entries[ENTRY_cuCtxRecordEvent] = (void *)record_context;
    takes_time = true;
    waits = false;
    for (int round = 0; round < 2; round++) {
        pthread_create(&thread, NULL, other_thread, NULL);
        pthread_barrier_wait(&steps);
        CHECK(!vgpu_streams_idle() && !vgpu_streams_idle());
        pthread_barrier_wait(&steps);
        pthread_join(thread, NULL);
        if (round == 1) { /* more has come since */
            pthread_create(&thread, NULL, other_thread, NULL);
            pthread_barrier_wait(&steps);
            event_busy = false;
            CHECK(!vgpu_streams_idle());
            pthread_barrier_wait(&steps);
            pthread_join(thread, NULL);
        }
        event_busy = false;
        CHECK(vgpu_streams_idle() && vgpu_streams_idle());
    }
    takes_time = false;
    CHECK(!warnings);
}

/* A thread has one in each context; what it still has to do in one is no secret of the other one. */
static void check_own_streams_of_two_contexts(void) {
    CUcontext popped;
    begin();
    for (int i = 1; i <= 2; i++) { /* both are known, and have been waited for */
        push(CONTEXT(i));
        use(CU_STREAM_PER_THREAD);
        vgpu_own_stream_finished();
        pop(&popped);
    }
    use(CU_STREAM_PER_THREAD);
    own_busy[1] = true;
    CHECK(!vgpu_streams_idle());
    push(CONTEXT(2));
    vgpu_own_stream_finished(); /* a wait for the one that has nothing to do */
    pop(&popped);
    CHECK(!vgpu_streams_idle());
    vgpu_own_stream_finished();
    own_busy[1] = false;
    CHECK(vgpu_streams_idle() && !warnings);
    use(CU_STREAM_PER_THREAD);
    push(CONTEXT(2));
    use(CU_STREAM_PER_THREAD); /* the first has finished, though nobody has asked */
    CHECK(vgpu_streams_idle() && !warnings);
    use(CU_STREAM_PER_THREAD);
    own_busy[2] = true;
    pop(&popped);
    use(CU_STREAM_PER_THREAD);
    CHECK(!vgpu_streams_idle() && warnings == 1);
}

static void *look_for_long(void *unused) {
    stays = true;
    CHECK(vgpu_streams_idle());
    return unused;
}

/* Forked while another thread asks about streams. */
static void check_a_child_waits_for_nobody(void) {
    pthread_t thread;
    int status;
    begin();
    make(0);
    process = (int)getpid();
    pthread_create(&thread, NULL, look_for_long, NULL);
    pthread_barrier_wait(&steps);
    const pid_t child = fork();
    if (!child) {
        alarm(10);
        use(STREAM(1));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pthread_barrier_wait(&steps);
    pthread_join(thread, NULL);
}

int main(void) {
    pthread_barrier_init(&steps, NULL, 2);
    play();
    vgpu_gate_arm();
    check_created_streams();
    check_legacy_streams();
    check_default_streams_of_others();
    check_streams_of_green_contexts();
    check_contexts_with_the_handle_of_one_that_goes();
    check_destroyed_streams();
    check_unknown_streams();
    check_streams_of_threads();
    check_own_streams_of_two_contexts();
    check_a_card_that_takes_time();
    check_a_child_waits_for_nobody();
    return 0;
}
