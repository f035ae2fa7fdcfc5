/* Streams that go, contexts that go, and captures beside them: prints nothing and ends with 0, or names the check that
 * failed. */
#define _GNU_SOURCE
#include "gate/streams.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "check.h"
#include "streams_driver.h"

#define MANY 40

static void begins_to_go(int i) {
    vgpu_streams_context_going(CONTEXT(i));
    dying = CONTEXT(i);
}

static void went(int i, bool gone) {
    dying = NULL;
    vgpu_streams_context_went(CONTEXT(i), gone);
}

/* Who destroys a stream of another context looks through what is left of others. */
static void check_what_is_left_in_a_context_that_goes_is_not_asked_for(void) {
    begin();
    for (int i = 0; i < MANY; i++) {
        exists[0] = busy[0] = event_busy = true;
        vgpu_stream_made(STREAM(0), CONTEXT(2));
        destroy(0);
    }
    CHECK(events == MANY);
    begins_to_go(2);
    event_busy = false;
    make(1);
    busy[1] = true;
    destroy(1);
    CHECK(events == MANY); /* the last one has passed, and the others are left alone */
    went(2, false);
    make(1);
    destroy(1);
    CHECK(vgpu_streams_idle() && events == 0 && !warnings);
}

static void turn_to_the_other_one(void) {
    CUcontext popped;
    push(CONTEXT(2));
    use(CU_STREAM_PER_THREAD);
    pop(&popped);
}

/* What a thread did in it may run still, and goes with it. */
static void check_a_thread_turns_away_from_a_context_that_goes(void) {
    begin();
    use(CU_STREAM_PER_THREAD);
    own_busy[1] = true;
    begins_to_go(1);
    turn_to_the_other_one();
    went(1, true);
    CHECK(vgpu_streams_idle() && !warnings);
    own_busy[2] = true;
    turn_to_the_other_one();
    CHECK(!vgpu_streams_idle() && !warnings);
    own_busy[2] = false;
    CHECK(vgpu_streams_idle());

    begin();
    use(CU_STREAM_PER_THREAD);
    begins_to_go(1);
    turn_to_the_other_one();
    went(1, false); /* it stays, and nobody knows when that work ends */
    CHECK(!vgpu_streams_idle() && warnings == 1);
}

/* One that was about to go, and stays, is asked as before. */
static void check_a_thread_turns_away_from_a_context_that_stayed(void) {
    begin();
    use(CU_STREAM_PER_THREAD);
    begins_to_go(1);
    went(1, false);
    turn_to_the_other_one();
    CHECK(vgpu_streams_idle() && !warnings);
    vgpu_own_stream_finished();
    use(CU_STREAM_PER_THREAD);
    own_busy[1] = true;
    begins_to_go(1);
    went(1, false);
    turn_to_the_other_one();
    CHECK(!vgpu_streams_idle() && warnings == 1);
}

/* A query in an ordinary mode breaks what another thread captures, and any query what is captured in that very stream.
 */
static void check_captures_are_not_broken(void) {
    for (int own = 0; own < 2; own++) {
        begin();
        use(CU_STREAM_PER_THREAD);
        vgpu_open_captures = 1;
        captured = own ? CU_STREAM_PER_THREAD : STREAM(5);
        turn_to_the_other_one();
        CHECK(warnings == own && strictness == CU_STREAM_CAPTURE_MODE_GLOBAL);
        vgpu_open_captures = 0;
        captured = NULL;
        CHECK(vgpu_streams_idle() == !own);
    }
}

static void destroy_amid_a_capture(int i) {
    make(i);
    vgpu_open_captures = 1;
    captured = STREAM(i);
    destroy(i);
    vgpu_open_captures = 0;
    captured = NULL;
}

/* What it did before can be asked for with all else of its context alone, also by the program's own wait. */
static void check_a_stream_goes_amid_its_capture(void) {
    struct vgpu_stream_wait wait;
    begin();
    vgpu_driver_entries[ENTRY_cuCtxRecordEvent] = (void *)record_context;
    others_busy = true;
    destroy_amid_a_capture(3);
    CHECK(!vgpu_streams_idle());
    others_busy = event_busy = false;
    CHECK(vgpu_streams_idle() && !warnings);

    begin();
    destroy_amid_a_capture(3);
    vgpu_context_waiting(&wait, CONTEXT(1));
    destroy_amid_a_capture(3);
    vgpu_context_finished(&wait);
    CHECK(!vgpu_streams_idle());
    vgpu_context_waiting(&wait, CONTEXT(1));
    vgpu_context_finished(&wait);
    CHECK(vgpu_streams_idle() && !warnings);

    destroy_amid_a_capture(3);
    begins_to_go(1);
    went(1, true);
    CHECK(vgpu_streams_idle() && !warnings);
}

static void *look_and_use(void *unused) {
    push(CONTEXT(1));
    CHECK(!vgpu_gate_close(1000)); /* what it has to do is nowhere yet */
    make(2);
    use(STREAM(2));
    return unused;
}

static void have_others_go_on(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, look_and_use, NULL);
    pthread_join(thread, NULL);
}

/* The driver waits in a call, as one does whose queue is full, for what another thread is about to do. */
static void check_nobody_waits_for_an_event_that_is_being_recorded(void) {
    begin();
    make(0);
    busy[0] = event_busy = true;
    meanwhile = have_others_go_on;
    alarm(20);
    destroy(0);
    alarm(0);
    meanwhile = NULL;
    CHECK(vgpu_gate_close(1000000000));
    CHECK(events == 1 && !vgpu_streams_idle());
    event_busy = false;
    CHECK(vgpu_streams_idle() && !warnings);
    vgpu_gate_open();
}

static void *hand_in_much(void *steps_to_go) {
    push(CONTEXT(1));
    for (int i = 0; i < *(int *)steps_to_go; i++)
        use(CU_STREAM_PER_THREAD);
    return NULL;
}

static void begin_with(int calls) {
    pthread_t thread;
    begin();
    vgpu_driver_entries[ENTRY_cuCtxRecordEvent] = (void *)record_context;
    records = 0;
    pthread_create(&thread, NULL, hand_in_much, &calls);
    pthread_join(thread, NULL);
}

/* Nobody waits for room in a full queue with the gate closed. */
static void check_a_full_queue_is_asked_by_a_thread_that_has_time(void) {
    begin_with(512);
    CHECK(vgpu_streams_idle() && records == 1);
    begin_with(513);
    CHECK(!vgpu_streams_idle() && !records);
    vgpu_open_captures = 1;
    vgpu_streams_mark_late();
    CHECK(!records); /* it would break it */
    vgpu_open_captures = 0;
    CHECK(!vgpu_streams_idle());
    others_busy = true;
    vgpu_streams_mark_late();
    CHECK(!vgpu_streams_idle() && records == 1);
    vgpu_streams_mark_late(); /* what was recorded is asked again, not recorded anew */
    others_busy = event_busy = false;
    CHECK(vgpu_streams_idle() && records == 1 && !warnings);
}

static atomic_bool destroyed;

static void *destroy_context(void *unused) {
    begins_to_go(1);
    atomic_store(&destroyed, true);
    return unused;
}

static pthread_t destroyer;

static void have_it_destroyed(void) {
    vgpu_marks_settle(); /* a capture is about to begin: it waits, but not for long */
    pthread_create(&destroyer, NULL, destroy_context, NULL);
    for (int i = 0; i < 20000; i++) { /* the other one has every chance */
        CHECK(!atomic_load(&destroyed));
        sched_yield();
    }
}

static void check_a_context_that_is_asked_does_not_go(void) {
    begin_with(513);
    CHECK(!vgpu_streams_idle());
    meanwhile = have_it_destroyed;
    vgpu_streams_mark_late();
    meanwhile = NULL;
    pthread_join(destroyer, NULL);
    went(1, true);
    CHECK(records == 1 && vgpu_streams_idle());
    begin_with(513);
    CHECK(!vgpu_streams_idle());
    begins_to_go(1);
    vgpu_streams_mark_late();
    CHECK(!records);
    went(1, false);
    vgpu_streams_mark_late();
    CHECK(records == 1 && vgpu_streams_idle() && !warnings);
}

int main(void) {
    play();
    vgpu_gate_arm();
    check_what_is_left_in_a_context_that_goes_is_not_asked_for();
    check_a_thread_turns_away_from_a_context_that_goes();
    check_a_thread_turns_away_from_a_context_that_stayed();
    check_captures_are_not_broken();
    check_a_stream_goes_amid_its_capture();
    check_nobody_waits_for_an_event_that_is_being_recorded();
    check_a_full_queue_is_asked_by_a_thread_that_has_time();
    check_a_context_that_is_asked_does_not_go();
    return 0;
}
