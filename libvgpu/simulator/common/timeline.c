/* A card's time line: one kernel at a time, in the order of the launches of all processes.
 *
 * Launches wait in a ring; whoever looks at the card moves it to now. A launch starts when the one before it has ended; if its process died before
 * that it vanishes, if it dies while running it ends there. All writes are made so that doing them again after the death of the writer changes
 * nothing: results are computed into the launch first, `phase` says that they are there, and then they are stored, never added. */
#include <errno.h>
#include <sched.h>
#include <time.h>

#include "common/state.h"

#define SPIN_NS 70000u   /* a sleep overshoots by about this much */
#define SLICE_NS 2000000u /* while somebody else's launches are ahead: they may vanish */

static struct sim_launch *at(struct sim_card *card, uint64_t position)
{
    return &card->queue[position % SIM_QUEUE];
}

static bool owner_lives(struct sim *sim, const struct sim_launch *launch, uint64_t now)
{
    struct sim_slot *slot = &sim->state->slots[launch->slot];
    if (sim->self && launch->slot == sim->slot && launch->generation == sim->generation)
        return true;
    if (atomic_load(&slot->owner) != ((uint64_t)launch->generation << 2 | SIM_LIVE))
        return false;
    uint64_t seen = atomic_load_explicit(&slot->seen_ns, memory_order_relaxed);
    return seen + SIM_TEARDOWN_NS > now || sim_alive(sim, launch->slot);
}

/* When a dead owner was last known to live; nothing of it started later. */
static uint64_t last_seen(struct sim *sim, const struct sim_launch *launch)
{
    struct sim_slot *slot = &sim->state->slots[launch->slot];
    return atomic_load(&slot->owner) >> 2 == launch->generation ? atomic_load(&slot->seen_ns) : 0;
}

static struct sim_process *owner_of(struct sim *sim, const struct sim_launch *launch)
{
    struct sim_process *process = sim_peer(sim, launch->slot);
    return process && atomic_load(&process->generation) == launch->generation ? process : NULL;
}

static void begin(struct sim_launch *launch, uint64_t start, uint64_t end)
{
    launch->start = start;
    launch->end = end;
    atomic_store_explicit(&launch->phase, SIM_RUNNING, memory_order_release);
}

/* Ends the head of the queue; may run again from the start after the death of whoever ran it. */
static void finish(struct sim *sim, int index, struct sim_launch *launch)
{
    struct sim_card *card = &sim->state->cards[index];
    struct sim_process *process = owner_of(sim, launch);
    if (atomic_load(&launch->phase) != SIM_FINISHED) {
        uint64_t ran = launch->end - launch->start;
        launch->card_busy = atomic_load_explicit(&card->busy_ns, memory_order_relaxed) + ran;
        launch->process_busy = process ? atomic_load_explicit(&process->cards[index].busy_ns, memory_order_relaxed) + ran : 0;
        atomic_store_explicit(&launch->phase, SIM_FINISHED, memory_order_release);
    }
    if (process) {
        atomic_store_explicit(&process->cards[index].busy_ns, launch->process_busy, memory_order_relaxed);
        atomic_store_explicit(&process->ends[index][launch->sequence % SIM_ENDS], launch->end, memory_order_relaxed);
        atomic_store_explicit(&process->cards[index].completed, launch->sequence, memory_order_release);
    }
    atomic_store_explicit(&card->busy_ns, launch->card_busy, memory_order_relaxed);
    atomic_store_explicit(&card->clock_ns, launch->end, memory_order_relaxed);
    atomic_store_explicit(&card->head, atomic_load_explicit(&card->head, memory_order_relaxed) + 1, memory_order_release);
}

/* Under the card's time lock. */
static void advance(struct sim *sim, int index, uint64_t now)
{
    struct sim_card *card = &sim->state->cards[index];
    uint64_t tail = atomic_load_explicit(&card->tail, memory_order_relaxed);
    while (atomic_load_explicit(&card->head, memory_order_relaxed) < tail) {
        struct sim_launch *launch = at(card, atomic_load_explicit(&card->head, memory_order_relaxed));
        if (atomic_load_explicit(&launch->phase, memory_order_relaxed) == SIM_QUEUED) {
            uint64_t clock = atomic_load_explicit(&card->clock_ns, memory_order_relaxed);
            uint64_t start = clock > launch->not_before ? clock : launch->not_before;
            if (!owner_lives(sim, launch, now) && start > last_seen(sim, launch))
                begin(launch, clock, clock);
            else if (start > now)
                return;
            else
                begin(launch, start, start + launch->duration);
        }
        if (atomic_load(&launch->phase) == SIM_RUNNING && launch->end > now) {
            if (owner_lives(sim, launch, now))
                return;
            launch->end = launch->start < now ? now : launch->start;
        }
        finish(sim, index, launch);
    }
}

void sim_advance(struct sim *sim, int index)
{
    struct sim_card *card = &sim->state->cards[index];
    if (atomic_load(&card->head) == atomic_load(&card->tail))
        return;
    sim_acquire(sim, &card->time_lock);
    advance(sim, index, sim_now());
    sim_release(&card->time_lock);
}

bool sim_finished(struct sim *sim, int index, uint64_t sequence)
{
    if (atomic_load_explicit(&sim->self->cards[index].completed, memory_order_acquire) >= sequence)
        return true;
    sim_advance(sim, index);
    return atomic_load_explicit(&sim->self->cards[index].completed, memory_order_acquire) >= sequence;
}

/* Under the time lock. Launches that this process still has on the card are found from the tail: its own are seldom far. */
static uint64_t expected_end(struct sim *sim, int index, uint64_t sequence, bool *others)
{
    struct sim_card *card = &sim->state->cards[index];
    uint64_t head = atomic_load(&card->head), position = atomic_load(&card->tail);
    *others = false;
    while (position > head) {
        struct sim_launch *launch = at(card, --position);
        if (launch->slot != sim->slot || launch->generation != sim->generation || launch->sequence > sequence)
            continue;
        struct sim_launch *first = at(card, head);
        uint64_t clock = atomic_load(&card->clock_ns), start = clock > first->not_before ? clock : first->not_before;
        uint64_t first_end = atomic_load(&first->phase) == SIM_QUEUED ? start + first->duration : first->end;
        *others = position - head >= sequence - atomic_load(&sim->self->cards[index].completed);
        return first_end + launch->cumulative - first->cumulative;
    }
    return 0;
}

uint64_t sim_expected_end(struct sim *sim, int index, uint64_t sequence)
{
    struct sim_card *card = &sim->state->cards[index];
    bool others;
    if (sim_finished(sim, index, sequence))
        return atomic_load(&sim->self->ends[index][sequence % SIM_ENDS]);
    sim_acquire(sim, &card->time_lock);
    uint64_t end = expected_end(sim, index, sequence, &others);
    sim_release(&card->time_lock);
    return end;
}

static void doze_until(uint64_t deadline)
{
    struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u), .tv_nsec = (long)(deadline % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); /* a signal only makes us look again */
}

void sim_sleep_until(uint64_t deadline)
{
    if (deadline > sim_now() + SPIN_NS)
        doze_until(deadline - SPIN_NS);
    while (sim_now() < deadline && deadline - sim_now() <= SPIN_NS)
        __asm__ volatile("" ::: "memory");
}

uint64_t sim_wait(struct sim *sim, int index, uint64_t sequence)
{
    if (!sequence)
        return 0;
    while (!sim_finished(sim, index, sequence) && sim_self_valid(sim)) {
        struct sim_card *card = &sim->state->cards[index];
        bool others;
        sim_acquire(sim, &card->time_lock);
        uint64_t end = expected_end(sim, index, sequence, &others);
        sim_release(&card->time_lock);
        uint64_t limit = sim_now() + SLICE_NS;
        if (others && end > limit)
            doze_until(limit);
        else
            sim_sleep_until(end);
    }
    return atomic_load(&sim->self->ends[index][sequence % SIM_ENDS]);
}

uint64_t sim_launch(struct sim *sim, int index, uint64_t duration, uint64_t not_before)
{
    struct sim_card *card = &sim->state->cards[index];
    struct sim_process *self = sim->self;
    for (;;) {
        uint64_t issued = atomic_load_explicit(&self->cards[index].issued, memory_order_relaxed);
        if (issued - atomic_load_explicit(&self->cards[index].completed, memory_order_acquire) >= SIM_IN_FLIGHT)
            sim_wait(sim, index, issued + 1 - SIM_IN_FLIGHT);
        if (!sim_self_valid(sim))
            return 0;
        sim_acquire(sim, &card->time_lock);
        uint64_t now = sim_now(), tail = atomic_load_explicit(&card->tail, memory_order_relaxed);
        advance(sim, index, now);
        issued = atomic_load_explicit(&self->cards[index].issued, memory_order_relaxed);
        bool full = tail - atomic_load(&card->head) >= SIM_QUEUE || issued - atomic_load(&self->cards[index].completed) >= SIM_IN_FLIGHT;
        if (full) {
            sim_release(&card->time_lock);
            sched_yield();
            continue;
        }
        struct sim_launch *launch = at(card, tail);
        launch->not_before = not_before > now ? not_before : now;
        launch->duration = duration;
        launch->cumulative = tail ? at(card, tail - 1)->cumulative + duration : duration;
        launch->sequence = issued + 1;
        launch->slot = sim->slot;
        launch->generation = sim->generation;
        launch->start = launch->end = 0;
        atomic_store_explicit(&launch->phase, SIM_QUEUED, memory_order_relaxed);
        atomic_store_explicit(&self->cards[index].issued, issued + 1, memory_order_relaxed);
        atomic_store_explicit(&self->cards[index].launches, issued + 1, memory_order_relaxed);
        atomic_store_explicit(&card->tail, tail + 1, memory_order_release);
        atomic_store_explicit(&sim->state->slots[sim->slot].seen_ns, now, memory_order_relaxed);
        sim_release(&card->time_lock);
        return issued + 1;
    }
}

uint32_t sim_share(struct sim *sim, int index, int slot, bool *recent)
{
    struct sim_card *card = &sim->state->cards[index];
    uint64_t window = 1000000000u, busy = 0;
    sim_acquire(sim, &card->time_lock);
    uint64_t now = sim_now(), since = now > window ? now - window : 0;
    advance(sim, index, now);
    uint64_t head = atomic_load(&card->head), tail = atomic_load(&card->tail);
    uint64_t oldest = tail > SIM_QUEUE ? tail - SIM_QUEUE : 0, position = head + (head < tail); /* the running one counts */
    bool complete = false;
    *recent = false;
    while (position > oldest) {
        struct sim_launch *launch = at(card, --position);
        uint64_t phase = atomic_load(&launch->phase), end = launch->end < now ? launch->end : now;
        if (phase == SIM_QUEUED)
            continue;
        if (end <= since) {
            complete = true;
            break;
        }
        if (slot >= 0 && (launch->slot != (uint32_t)slot || (uint64_t)launch->generation != atomic_load(&sim->state->slots[slot].owner) >> 2))
            continue;
        busy += end - (launch->start > since ? launch->start : since);
        *recent = true;
    }
    /* with very short kernels the ring holds less than a second: then the share of what it holds */
    if (!complete && tail > SIM_QUEUE && position == oldest && at(card, oldest)->start > since)
        window = now - at(card, oldest)->start;
    sim_release(&card->time_lock);
    return window ? (uint32_t)(busy * 1000000u / window) : 0;
}
