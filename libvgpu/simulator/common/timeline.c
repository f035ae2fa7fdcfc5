/* How a process gives work to a card and waits for it. Every process has a ring of its own for each card (struct
 * sim_process). A process's launches run in the order of their streams, or one after the other if kernels run one by
 * one. slices.c advances the cards' time. */
#include <errno.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include "common/state.h"

#define LOOK_NS 2000000u /* while another process has the card: that process may die or stop */
#define ROOM_NS 500000u  /* a launch that finds the queue full waits until this much more work has ended */
#define LEAST_EARLY_NS 2000u
#define MOST_EARLY_NS 60000u

static struct sim_launch *launch_at(const struct sim *sim, int index, uint64_t sequence) {
    return &sim->self->launched[index][sequence % SIM_RING];
}

/* Marks that this process has work for the card; the process that advances the card reads the mark. A mark can get
 * lost: a stopped holder of the card's lock may lose the lock and later store an old value. So a waiting process sets
 * the mark again. */
static void mark_active(struct sim *sim, int index) {
    const struct sim_share_of_card *own = &sim->self->cards[index];
    _Atomic uint64_t *word = &sim->state->cards[index].active[sim->slot / 64];
    uint64_t bit = 1ull << sim->slot % 64;
    if (!(atomic_load_explicit(word, memory_order_relaxed) & bit) &&
        atomic_load_explicit(&own->completed, memory_order_relaxed) <
            atomic_load_explicit(&own->issued, memory_order_relaxed))
        atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
}

void sim_advance(struct sim *sim, int index) {
    struct sim_card *card = &sim->state->cards[index];
    if (sim_self_valid(sim))
        mark_active(sim, index);
    uint64_t some = atomic_load(&card->step.written) - atomic_load(&card->step.applied);
    for (uint32_t word = 0; !some && word * 64 < atomic_load(&sim->state->slots_used); word++)
        some = atomic_load_explicit(&card->active[word], memory_order_relaxed);
    if (!some)
        return;
    sim_time_begin(sim, index);
    sim_release(&card->time_lock);
}

static bool ended(struct sim *sim, int index, struct sim_mark mark) {
    uint64_t completed = atomic_load_explicit(&sim->self->cards[index].completed, memory_order_acquire);
    return mark.prefix <= completed &&
           (mark.launch <= completed || atomic_load(&launch_at(sim, index, mark.launch)->phase) == SIM_FINISHED);
}

bool sim_reached(struct sim *sim, int index, struct sim_mark mark) {
    if (!mark.launch && !mark.prefix)
        return true;
    if (ended(sim, index, mark))
        return true;
    sim_advance(sim, index);
    return ended(sim, index, mark);
}

bool sim_finished(struct sim *sim, int index, uint64_t sequence) {
    return sim_reached(sim, index, (struct sim_mark){0, sequence});
}

/* Checking the last SIM_WINDOW launches is enough: earlier launches had ended before these began. */
uint64_t sim_reached_at(struct sim *sim, int index, struct sim_mark mark) {
    uint64_t end = mark.launch ? atomic_load(&launch_at(sim, index, mark.launch)->end) : 0;
    for (uint64_t back = 0; back < mark.prefix && back < (sim->self->kernels > 1 ? SIM_WINDOW : 1); back++) {
        uint64_t one = atomic_load(&launch_at(sim, index, mark.prefix - back)->end);
        end = one > end ? one : end;
    }
    return end;
}

uint64_t sim_expected_end(struct sim *sim, int index, struct sim_mark mark) {
    struct sim_card *card = &sim->state->cards[index];
    bool shared;
    if (sim_reached(sim, index, mark))
        return sim_reached_at(sim, index, mark);
    sim_time_begin(sim, index);
    uint64_t end = ended(sim, index, mark) ? sim_reached_at(sim, index, mark) : sim_predict(sim, index, mark, &shared);
    sim_release(&card->time_lock);
    return end;
}

/* Sleeps with the kernel's smallest timer slack, then restores the old slack. */
static void doze_until(uint64_t deadline) {
    struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u), .tv_nsec = (long)(deadline % 1000000000u)};
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); /* after a signal the caller checks again */
    prctl(PR_SET_TIMERSLACK, slack > 0 ? slack : 0);
}

/* A sleep ends late by the machine's wake-up time. So the sleep ends early by that much, and the rest is spun. */
void sim_sleep_until(uint64_t deadline) {
    static _Atomic uint64_t early = 20000;
    uint64_t margin = atomic_load_explicit(&early, memory_order_relaxed), now = sim_now();
    if (deadline > now + margin) {
        doze_until(deadline - margin);
        now = sim_now();
        uint64_t late = now > deadline - margin ? now - (deadline - margin) : 0;
        late = late > MOST_EARLY_NS ? MOST_EARLY_NS : late < LEAST_EARLY_NS ? LEAST_EARLY_NS : late;
        atomic_store_explicit(&early, margin + late / 8 - margin / 8, memory_order_relaxed);
    }
    while (now < deadline && deadline - now <= MOST_EARLY_NS) {
        __asm__ volatile("" ::: "memory");
        now = sim_now();
    }
}

/* The last copy of a dead process is dropped; the copies behind it keep their times. */
uint64_t sim_engine(struct sim *sim, int index, enum sim_engine_kind kind, uint64_t begin, uint64_t duration) {
    struct sim_engine *engine = &sim->state->cards[index].engines[kind];
    if (!sim_self_valid(sim))
        return begin;
    sim_acquire(sim, &sim->state->cards[index].time_lock);
    uint64_t free_at = atomic_load(&engine->free_ns), owner = atomic_load(&engine->owner);
    uint64_t own = (uint64_t)sim->generation << 32 | (sim->slot + 1);
    if (free_at > begin && owner != own) {
        uint32_t slot = (uint32_t)owner - 1;
        if (!sim_alive(sim, slot) || atomic_load(&sim->state->slots[slot].owner) >> 2 != owner >> 32)
            free_at = begin;
    }
    uint64_t end = (free_at > begin ? free_at : begin) + duration;
    atomic_store(&engine->free_ns, end);
    atomic_store(&engine->owner, own);
    sim_release(&sim->state->cards[index].time_lock);
    return end;
}

void sim_wait_mark(struct sim *sim, int index, struct sim_mark mark) {
    struct sim_card *card = &sim->state->cards[index];
    while (!sim_reached(sim, index, mark) && sim_self_valid(sim)) {
        bool shared;
        uint64_t now = sim_time_begin(sim, index);
        uint64_t end = ended(sim, index, mark) ? 0 : sim_predict(sim, index, mark, &shared);
        atomic_store_explicit(&sim->state->slots[sim->slot].seen_ns, now, memory_order_relaxed);
        sim_release(&card->time_lock);
        /* SIM_NEVER appears while a lost lock is being repaired */
        if (end && (shared || end == SIM_NEVER) && end > now + LOOK_NS)
            doze_until(now + LOOK_NS);
        else if (end)
            sim_sleep_until(end);
    }
}

void sim_wait(struct sim *sim, int index, uint64_t sequence) {
    sim_wait_mark(sim, index, (struct sim_mark){0, sequence});
}

uint32_t sim_group(struct sim *sim, uint64_t key, uint32_t size) {
    struct sim_state *state = sim->state;
    uint32_t found = 0;
    sim_acquire(sim, &state->registry_lock);
    uint32_t used = atomic_load(&state->groups_used);
    for (uint32_t i = 0; i < used && !found; i++)
        if (atomic_load(&state->groups[i].key) == key)
            found = i + 1;
    if (!found && used < SIM_GROUPS) {
        state->groups[used].size = size;
        atomic_store(&state->groups[used].key, key);
        if (!used)
            atomic_store(&state->joint_ns, sim_now());
        atomic_store(&state->groups_used, found = used + 1);
    }
    sim_release(&state->registry_lock);
    return found;
}

/* Waits until one more launch fits. With short kernels it waits until several fit, because waking up for each one costs
 * more than it gives. */
static void wait_for_room(struct sim *sim, int index, uint64_t issued) {
    uint64_t first = issued + 1 - SIM_IN_FLIGHT, more = 0, due = atomic_load(&launch_at(sim, index, first)->due);
    while (sim->self->kernels <= 1 && more < SIM_IN_FLIGHT / 4 &&
           atomic_load(&launch_at(sim, index, first + more + 1)->due) < due + ROOM_NS)
        more++;
    sim_wait(sim, index, first + more);
}

void sim_seen(struct sim *sim) {
    if (sim_self_valid(sim))
        atomic_store_explicit(&sim->state->slots[sim->slot].seen_ns, sim_now(), memory_order_relaxed);
}

/* Call with the card's time lock held. The time on the card that this process's unfinished launches still need. If they
 * run side by side, it is their sum. */
static uint64_t left_to_run(const struct sim *sim, int index) {
    const struct sim_share_of_card *own = &sim->self->cards[index];
    uint64_t issued = atomic_load_explicit(&own->issued, memory_order_relaxed),
             completed = atomic_load(&own->completed);
    uint64_t progress = atomic_load(&own->progress_ns), left = 0;
    for (uint64_t sequence = sim->self->kernels <= 1 ? issued : completed + 1; issued > completed && sequence <= issued;
         sequence++) {
        const struct sim_launch *launch = launch_at(sim, index, sequence);
        uint32_t phase = atomic_load(&launch->phase);
        if (phase == SIM_RUNNING || sim->self->kernels <= 1)
            left += atomic_load(&launch->due) - progress;
        else if (phase == SIM_QUEUED)
            left += launch->duration;
    }
    return left;
}

void sim_wait_queued(struct sim *sim, int index) {
    const uint64_t most = sim->timing.queued_ns, least_ns = 50000;
    struct sim_card *card = &sim->state->cards[index];
    while (most != SIM_NEVER && sim_self_valid(sim)) {
        mark_active(sim, index);
        uint64_t now = sim_time_begin(sim, index);
        uint64_t left = left_to_run(sim, index);
        atomic_store_explicit(&sim->state->slots[sim->slot].seen_ns, now, memory_order_relaxed);
        sim_release(&card->time_lock);
        if (left <= most)
            return;
        uint64_t wait = (left - most) / sim->self->kernels;
        sim_sleep_until(now + (wait < least_ns ? least_ns : wait > LOOK_NS ? LOOK_NS : wait));
    }
}

uint64_t sim_launch(struct sim *sim, int index, uint64_t duration, uint32_t width, uint64_t not_before,
                    struct sim_mark after, uint32_t group) {
    struct sim_card *card = &sim->state->cards[index];
    struct sim_share_of_card *own = &sim->self->cards[index];
    for (;;) {
        /* read first, so that it never exceeds `issued`, even if other processes advance the card meanwhile */
        uint64_t completed = atomic_load_explicit(&own->completed, memory_order_acquire);
        uint64_t issued = atomic_load_explicit(&own->issued, memory_order_relaxed);
        if (issued - completed >= SIM_IN_FLIGHT)
            wait_for_room(sim, index, issued);
        if (!sim_self_valid(sim))
            return 0;
        uint64_t now = sim_time_begin(sim, index);
        issued = atomic_load_explicit(&own->issued, memory_order_relaxed);
        if (issued - atomic_load(&own->completed) >= SIM_IN_FLIGHT) {
            sim_release(&card->time_lock);
            sched_yield();
            continue;
        }
        uint64_t sequence = issued + 1, begin = now + sim->timing.launch_ns;
        struct sim_launch *launch = launch_at(sim, index, sequence);
        launch->not_before = not_before > begin ? not_before : begin;
        launch->duration = duration;
        launch->after = after.launch;
        launch->prefix = after.prefix;
        launch->width = width;
        launch->group = group;
        if (group)
            launch->meeting = atomic_fetch_add(&sim->state->groups[group - 1].cards[index].issued, 1);
        atomic_store_explicit(&launch->due, (issued ? atomic_load(&launch_at(sim, index, issued)->due) : 0) + duration,
                              memory_order_relaxed);
        atomic_store_explicit(&launch->phase, SIM_QUEUED, memory_order_relaxed);
        if (width)
            atomic_store_explicit(&own->launches, atomic_load(&own->launches) + 1, memory_order_relaxed);
        atomic_store_explicit(&own->issued, sequence, memory_order_release);
        mark_active(sim, index);
        atomic_store_explicit(&sim->state->slots[sim->slot].seen_ns, now, memory_order_relaxed);
        sim_release(&card->time_lock);
        return sequence;
    }
}
