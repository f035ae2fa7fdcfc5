/* How a card's time advances: which process has its turn, and what that process does with it.
 *
 * Processes with work for a card take turns of one slice each. A change costs time, and a process alone is never
 * interrupted. There is no daemon: any process that looks at the card moves it to now, under the card's lock.
 *
 * All changes that belong together are first written into the card's step. They are then stored, never added, so that
 * the next process can repeat them after a death in the middle. A dead process stops at the time when it was last known
 * to live, at most SIM_TEARDOWN_NS later. */
#include "common/state.h"

#define SPIN_LOOK_NS 50000u /* a process that waits for a kernel that may spin looks again after this time */
/* The cards' time advances in such steps where kernels on several cards meet. If no process looked for long, the steps
 * are coarser. */
#define JOINT_STEP_NS 20000u

struct lane { /* a process on the card */
    uint32_t slot, generation;
    struct sim_process *process;
    struct sim_share_of_card *at;
    struct sim_launch *ring;
};

static uint64_t load(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static struct sim_launch *launch_at(const struct lane *lane, uint64_t sequence) {
    return &lane->ring[sequence % SIM_RING];
}

static uint64_t name_of(const struct lane *lane) {
    return (uint64_t)lane->generation << 32 | (lane->slot + 1);
}

static bool lane_of(struct sim *sim, int index, uint32_t slot, struct lane *out) {
    struct sim_process *process = sim_peer(sim, slot);
    uint32_t generation = process ? atomic_load_explicit(&process->generation, memory_order_relaxed) : 0;
    uint64_t owner = load(&sim->state->slots[slot].owner);
    if (!process || (owner & 3) == SIM_UNUSED || (uint32_t)(owner >> 2) != generation)
        return false;
    *out = (struct lane){.slot = slot,
                         .generation = generation,
                         .process = process,
                         .at = &process->cards[index],
                         .ring = process->launched[index]};
    return true;
}

static bool current_lane(struct sim *sim, int index, struct lane *out) {
    uint64_t current = load(&sim->state->cards[index].current);
    return (uint32_t)current && lane_of(sim, index, (uint32_t)current - 1, out) && out->generation == current >> 32;
}

static void drop(struct sim_card *card, uint32_t slot) {
    atomic_fetch_and_explicit(&card->active[slot / 64], ~(1ull << slot % 64), memory_order_relaxed);
}

/* The time until which a process is known to live. */
static uint64_t horizon(struct sim *sim, const struct lane *lane) {
    bool own = sim->self && lane->slot == sim->slot && lane->generation == sim->generation;
    return own ? SIM_NEVER : load(&sim->state->slots[lane->slot].seen_ns) + SIM_TEARDOWN_NS;
}

static bool lives(struct sim *sim, const struct lane *lane, uint64_t clock) {
    return horizon(sim, lane) > clock || sim_alive(sim, lane->slot);
}

static void apply(struct sim *sim, int index) {
    struct sim_card *card = &sim->state->cards[index];
    const struct sim_step *step = &card->step;
    struct lane lane;
    if (lane_of(sim, index, step->slot, &lane) && lane.generation == step->generation) {
        if (step->finished) {
            store(&launch_at(&lane, step->finished)->end, step->clock_ns);
            atomic_store_explicit(&launch_at(&lane, step->finished)->phase, SIM_FINISHED, memory_order_release);
        }
        store(&lane.at->busy_ns, step->busy_ns);
        store(&lane.at->progress_ns, step->progress_ns);
        store(&lane.at->waited_ns, step->waited_ns);
        uint64_t completed = load(&lane.at->completed), issued = load(&lane.at->issued);
        while (completed < issued &&
               atomic_load_explicit(&launch_at(&lane, completed + 1)->phase, memory_order_relaxed) == SIM_FINISHED)
            completed++;
        atomic_store_explicit(&lane.at->completed, completed, memory_order_release);
    }
    store(&card->busy_ns, step->card_busy_ns);
    store(&card->current, step->current);
    store(&card->slice_start_ns, step->slice_start_ns);
    store(&card->switches, step->switches);
    store(&card->clock_ns, step->clock_ns);
    atomic_store_explicit(&card->step.applied, load(&step->written), memory_order_release);
}

static void make_step(struct sim *sim, int index, const struct sim_step *next) {
    struct sim_step *step = &sim->state->cards[index].step;
    step->slot = next->slot;
    step->generation = next->generation;
    step->clock_ns = next->clock_ns;
    step->card_busy_ns = next->card_busy_ns;
    step->current = next->current;
    step->slice_start_ns = next->slice_start_ns;
    step->switches = next->switches;
    step->busy_ns = next->busy_ns;
    step->progress_ns = next->progress_ns;
    step->waited_ns = next->waited_ns;
    step->finished = next->finished;
    atomic_store_explicit(&step->written, load(&step->applied) + 1, memory_order_release);
    apply(sim, index);
}

static struct sim_step step_of(const struct sim_card *card, const struct lane *lane) {
    return (struct sim_step){.slot = lane->slot,
                             .generation = lane->generation,
                             .clock_ns = load(&card->clock_ns),
                             .card_busy_ns = load(&card->busy_ns),
                             .current = load(&card->current),
                             .slice_start_ns = load(&card->slice_start_ns),
                             .switches = load(&card->switches),
                             .busy_ns = load(&lane->at->busy_ns),
                             .progress_ns = load(&lane->at->progress_ns),
                             .waited_ns = load(&lane->at->waited_ns)};
}

static uint32_t phase_of(const struct lane *lane, uint64_t sequence) {
    return atomic_load_explicit(&launch_at(lane, sequence)->phase, memory_order_relaxed);
}

static bool may_start(const struct lane *lane, uint64_t sequence) {
    const struct sim_launch *launch = launch_at(lane, sequence);
    uint64_t completed = load(&lane->at->completed);
    return launch->prefix <= completed && (launch->after <= completed || phase_of(lane, launch->after) == SIM_FINISHED);
}

static uint64_t window_end(const struct lane *lane) {
    return smaller(load(&lane->at->issued), load(&lane->at->completed) + SIM_WINDOW);
}

/* When a process will have something to run; 0: it has already. */
static uint64_t ready_at(const struct lane *lane) {
    uint64_t first = load(&lane->at->completed) + 1, soonest = SIM_NEVER;
    if (first > load(&lane->at->issued))
        return SIM_NEVER;
    if (lane->process->kernels <= 1)
        return launch_at(lane, first)->not_before;
    for (uint64_t sequence = first; sequence <= window_end(lane); sequence++) {
        if (phase_of(lane, sequence) == SIM_RUNNING)
            return 0;
        if (phase_of(lane, sequence) == SIM_QUEUED && may_start(lane, sequence))
            soonest = smaller(soonest, launch_at(lane, sequence)->not_before);
    }
    return soonest;
}

/* Starts kernels that may run next to the running ones, in the order of the launches. Returns when the next one could
 * start. */
static uint64_t start_more(const struct lane *lane, uint64_t clock) {
    uint64_t next = SIM_NEVER;
    uint32_t width = 0, running = 0;
    for (uint64_t sequence = load(&lane->at->completed) + 1; sequence <= window_end(lane); sequence++)
        if (phase_of(lane, sequence) == SIM_RUNNING) {
            width += launch_at(lane, sequence)->width;
            running += launch_at(lane, sequence)->width != 0;
        }
    for (uint64_t sequence = load(&lane->at->completed) + 1; sequence <= window_end(lane); sequence++) {
        struct sim_launch *launch = launch_at(lane, sequence);
        if (phase_of(lane, sequence) != SIM_QUEUED || !may_start(lane, sequence))
            continue;
        if (launch->width && running && (running >= lane->process->kernels || width + launch->width > SIM_WHOLE))
            break;
        if (launch->not_before > clock) {
            next = smaller(next, launch->not_before);
            continue;
        }
        store(&launch->due, load(&lane->at->progress_ns) + launch->duration);
        atomic_store_explicit(&launch->phase, SIM_RUNNING, memory_order_relaxed);
        width += launch->width;
        running += launch->width != 0;
    }
    return next;
}

/* The launch that will end first if the process continues. */
static uint64_t first_to_end(const struct lane *lane) {
    uint64_t found = load(&lane->at->completed) + 1;
    if (lane->process->kernels <= 1)
        return found;
    uint64_t due = SIM_NEVER;
    for (uint64_t sequence = found; sequence <= window_end(lane); sequence++)
        if (phase_of(lane, sequence) == SIM_RUNNING && load(&launch_at(lane, sequence)->due) < due) {
            due = load(&launch_at(lane, sequence)->due);
            found = sequence;
        }
    return found;
}

/* Whether at least one running launch is a kernel. */
static bool kernel_runs(const struct lane *lane, uint64_t first) {
    if (lane->process->kernels <= 1)
        return launch_at(lane, first)->width;
    for (uint64_t sequence = load(&lane->at->completed) + 1; sequence <= window_end(lane); sequence++)
        if (phase_of(lane, sequence) == SIM_RUNNING && launch_at(lane, sequence)->width)
            return true;
    return false;
}

/* Records that a meeting kernel has started. Returns when all have started, or SIM_NEVER. */
static uint64_t met_at(struct sim *sim, int index, const struct lane *lane, uint64_t sequence, uint64_t clock) {
    struct sim_launch *launch = launch_at(lane, sequence);
    struct sim_group *group = &sim->state->groups[launch->group - 1];
    uint64_t number = launch->meeting, last = 0;
    uint32_t come = 0;
    if (load(&group->cards[index].started) <= number) { /* stored again after a death in the middle */
        store(&group->cards[index].start_ns[number % SIM_MEETINGS], clock);
        store(&group->cards[index].started, number + 1);
    }
    for (uint32_t card = 0; card < sim->state->card_count; card++)
        if (load(&group->cards[card].started) > number) {
            last = larger(last, load(&group->cards[card].start_ns[number % SIM_MEETINGS]));
            come++;
        }
    return come >= group->size ? last : SIM_NEVER;
}

/* Lets the process run until `limit` at most; the process must have something to run. */
static void run(struct sim *sim, int index, const struct lane *lane, uint64_t limit) {
    struct sim_card *card = &sim->state->cards[index];
    struct sim_step step = step_of(card, lane);
    uint64_t clock = step.clock_ns;
    if (lane->process->kernels > 1)
        limit = smaller(limit, start_more(lane, clock));
    limit = smaller(limit, (clock / SIM_TICK_NS + 1) * SIM_TICK_NS);
    sim_usage_note(&card->usage, clock, step.card_busy_ns);
    sim_usage_note(&lane->at->usage, clock, step.busy_ns);
    uint64_t sequence = first_to_end(lane);
    uint64_t met = launch_at(lane, sequence)->group ? met_at(sim, index, lane, sequence, clock) : 0;
    if (met > clock) { /* the kernel spins: the card is busy without progress */
        step.clock_ns = smaller(met, limit);
        step.busy_ns += step.clock_ns - clock;
        step.card_busy_ns += step.clock_ns - clock;
        step.finished = 0;
        make_step(sim, index, &step);
        return;
    }
    uint64_t end = clock + load(&launch_at(lane, sequence)->due) - step.progress_ns;
    step.clock_ns = smaller(end, limit);
    step.progress_ns += step.clock_ns - clock;
    if (kernel_runs(lane, sequence)) {
        step.busy_ns += step.clock_ns - clock;
        step.card_busy_ns += step.clock_ns - clock;
    }
    step.finished = end <= limit ? sequence : 0;
    make_step(sim, index, &step);
}

/* When the current slice ends for a process that has waited since `since`. */
static uint64_t turn_end(const struct sim *sim, const struct sim_card *card, uint64_t since) {
    uint64_t begin = load(&card->slice_start_ns), slice = load(&sim->state->slice_ns);
    uint64_t slices = since > begin ? (since - begin + slice - 1) / slice : 1;
    return begin + (slices ? slices : 1) * slice;
}

/* When the first other process has work; SIM_NEVER: none has. Removes processes without work from `active`. */
static uint64_t others_ready_at(struct sim *sim, int index, uint64_t current) {
    struct sim_card *card = &sim->state->cards[index];
    uint64_t soonest = SIM_NEVER;
    for (uint32_t word = 0; word * 64 < atomic_load(&sim->state->slots_used); word++)
        for (uint64_t bits = load(&card->active[word]); bits; bits &= bits - 1) {
            struct lane lane;
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(bits);
            if (!lane_of(sim, index, slot, &lane) || load(&lane.at->completed) >= load(&lane.at->issued))
                drop(card, slot);
            else if (name_of(&lane) != current)
                soonest = smaller(soonest, ready_at(&lane));
        }
    return soonest;
}

/* Gives the card to the next process that is ready; false: none is. */
static bool switch_lane(struct sim *sim, int index) {
    struct sim_card *card = &sim->state->cards[index];
    uint64_t current = load(&card->current), clock = load(&card->clock_ns);
    uint32_t slots = (uint32_t)atomic_load(&sim->state->slots_used), from = (uint32_t)current;
    for (uint32_t i = 0; i < slots; i++) {
        struct lane lane, before;
        uint32_t slot = (from + i) % slots;
        if (!(load(&card->active[slot / 64]) >> slot % 64 & 1) || !lane_of(sim, index, slot, &lane) ||
            name_of(&lane) == current)
            continue;
        uint64_t ready = ready_at(&lane);
        if (ready > clock)
            continue;
        if (!lives(sim, &lane, clock)) {
            drop(card, slot);
            continue;
        }
        if (current_lane(sim, index, &before))
            store(&before.at->left_ns, clock);
        struct sim_step step = step_of(card, &lane);
        step.clock_ns = step.slice_start_ns = clock + (current ? load(&sim->state->switch_ns) : 0);
        step.waited_ns += step.clock_ns - smaller(larger(ready, load(&lane.at->left_ns)), step.clock_ns);
        step.switches += current != 0;
        step.current = name_of(&lane);
        make_step(sim, index, &step);
        return true;
    }
    return false;
}

void sim_advance_locked(struct sim *sim, int index, uint64_t now) {
    struct sim_card *card = &sim->state->cards[index];
    struct lane lane;
    if (load(&card->step.written) != load(&card->step.applied))
        apply(sim, index);
    bool taken = current_lane(sim, index, &lane);
    uint64_t others = others_ready_at(sim, index, taken ? name_of(&lane) : 0);
    for (;;) {
        uint64_t clock = load(&card->clock_ns), own = taken ? ready_at(&lane) : SIM_NEVER;
        if (clock >= now)
            return;
        if (own <= now && !lives(sim, &lane, larger(clock, own))) {
            drop(card, lane.slot);
            taken = false;
            continue;
        }
        if (own > clock && others > clock) { /* the card is idle */
            uint64_t next = smaller(own, others);
            if (next > now)
                return;
            store(&card->slice_start_ns, next);
            store(&card->clock_ns, next);
            continue;
        }
        uint64_t limit = now;
        if (others != SIM_NEVER) {
            uint64_t turn = own > clock ? clock : turn_end(sim, card, larger(others, clock));
            if (turn <= clock) {
                if (switch_lane(sim, index))
                    taken = current_lane(sim, index, &lane);
                others = others_ready_at(sim, index, taken ? name_of(&lane) : 0);
                continue;
            }
            limit = smaller(limit, turn);
        }
        run(sim, index, &lane, smaller(limit, horizon(sim, &lane)));
    }
}

uint64_t sim_time_begin(struct sim *sim, int index) {
    struct sim_state *state = sim->state;
    uint64_t now, at;
    if (!atomic_load_explicit(&state->groups_used, memory_order_relaxed)) {
        sim_acquire(sim, &state->cards[index].time_lock);
        now = sim_now();
        sim_advance_locked(sim, index, now);
        return now;
    }
    for (uint32_t card = 0; card < state->card_count; card++)
        sim_acquire(sim, &state->cards[card].time_lock);
    now = sim_now();
    at = smaller(load(&state->joint_ns), now);
    uint64_t step = larger(JOINT_STEP_NS, (now - at) / 1000);
    while (at < now) {
        at = smaller(at + step, now);
        for (uint32_t card = 0; card < state->card_count; card++)
            sim_advance_locked(sim, (int)card, at);
    }
    store(&state->joint_ns, now);
    for (uint32_t card = state->card_count; card > 0; card--) /* release in reverse order: see lock.c */
        sim_release(&state->cards[card - 1].time_lock);
    sim_acquire(sim, &state->cards[index].time_lock);
    now = sim_now();
    sim_advance_locked(sim, index, now);
    return now;
}

/* How much longer the process must at least have the card until this mark is reached. */
static uint64_t still_needed(const struct lane *lane, struct sim_mark mark) {
    uint64_t progress = load(&lane->at->progress_ns), last = larger(mark.launch, mark.prefix);
    const struct sim_launch *launch = launch_at(lane, lane->process->kernels <= 1 ? last : first_to_end(lane));
    uint64_t due = load(&launch->due);
    if (lane->process->kernels > 1 && atomic_load_explicit(&launch->phase, memory_order_relaxed) != SIM_RUNNING)
        return launch->duration;
    if (launch_at(lane, load(&lane->at->completed) + 1)->group) /* unknown when the other kernels come */
        return larger(due > progress ? due - progress : 0, SPIN_LOOK_NS);
    return due > progress ? due - progress : 0;
}

uint64_t sim_predict(struct sim *sim, int index, struct sim_mark mark, bool *shared) {
    struct sim_card *card = &sim->state->cards[index];
    struct lane own, lane;
    *shared = false;
    if (!lane_of(sim, index, sim->slot, &own))
        return 0;
    uint64_t begin = load(&card->clock_ns), ready = ready_at(&own), needed = still_needed(&own, mark);
    if (current_lane(sim, index, &lane) && name_of(&lane) != name_of(&own)) {
        uint64_t other = ready_at(&lane);
        if (other <= begin) {
            uint64_t rest =
                lane.process->kernels <= 1 ? still_needed(&lane, (struct sim_mark){0, load(&lane.at->issued)}) : 0;
            begin = smaller(begin + rest, turn_end(sim, card, larger(ready, begin)));
            *shared = true;
        }
        begin += load(&sim->state->switch_ns);
    }
    return larger(begin, ready) + needed;
}

uint64_t sim_waited(struct sim *sim, int index, uint32_t slot, uint64_t now) {
    struct lane lane;
    if (!lane_of(sim, index, slot, &lane))
        return 0;
    uint64_t waited = load(&lane.at->waited_ns), since = ready_at(&lane);
    if (since == SIM_NEVER || name_of(&lane) == load(&sim->state->cards[index].current) || !lives(sim, &lane, now))
        return waited;
    since = larger(since, load(&lane.at->left_ns));
    return waited + (now > since ? now - since : 0);
}
