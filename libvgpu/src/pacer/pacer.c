/* Lets each launch pay, wait for its start, and be measured. */
#define _GNU_SOURCE
#include "pacer/pacer.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "gate/gate.h"
#include "ledger/attach.h"
#include "ledger/charge.h"
#include "pacer/contention.h"
#include "pacer/firsts.h"
#include "pacer/graph_cards.h"
#include "pacer/inspect.h"
#include "pacer/launch_sources.h"
#include "pacer/launch_thread.h"
#include "pacer/owed.h"
#include "pacer/prepaid.h"
#include "pacer/settle.h"
#include "region/gcra.h"
#include "reserves/capture.h"

/* a launch carries shorter waits over to the next launch: a sleep overshoots by about that much */
#define CARRY_NS 60000u
#define FIRST_GUESS_NS 50000u /* price of an unknown launch */
#define QUEUED_NS 200000000u  /* a launch that has been under way for longer than this was not paid for */
/* longest wait, at the end of the process, for unknown launches under way */
#define EXIT_WAIT_NS 100000000u
#define REAP_EVERY_MS 250u
/* most GPU time that a thread pays in advance, and so keeps uncounted */
#define BATCH_NS 50000u
#define COUNTED_NS 1000000u         /* without a limit: most GPU time that a thread keeps uncounted */
#define COLLECT_EVERY_NS 100000u    /* asking the driver takes about a microsecond */
#define COLLECT_RARELY_NS 20000000u /* for fast launches with few results waiting, which no launch needs soon */
#define FEW 4
#define WINDOW_NS 500000000u

void vgpu_pacer_forget(void) {
    atomic_fetch_add(&vgpu_prepaid_epoch, 1);
    vgpu_sources_forget();
}

void vgpu_pacer_stale(uint64_t key) {
    vgpu_cost_doubt(key);
    atomic_fetch_add(&vgpu_prepaid_epoch, 1);
}

/* For several cards: the payment covers only launches on the card on which the thread has paid. */
static bool prepaid_here(uint64_t key, CUstream stream) {
    struct vgpu_place place;
    uint64_t price;
    if (atomic_load_explicit(&vgpu_one_card, memory_order_relaxed) || !vgpu_prepaid_covers(key, &price) ||
        !vgpu_place_of_stream(stream, &place) || place.card != vgpu_self.card)
        return false;
    vgpu_prepaid_spend(price, stream);
    return true;
}

/* Closes the utilisation window when it is old enough; only one of the racing processes does. */
static void turn_window(struct vgpu_pacer_card *pacer, uint64_t now) {
    uint64_t start = atomic_load_explicit(&pacer->window_start, memory_order_relaxed);
    if (now - start < WINDOW_NS || !atomic_compare_exchange_strong(&pacer->window_start, &start, now))
        return;
    uint64_t total = atomic_load(&pacer->gpu_ns);
    int64_t used = (int64_t)(total - atomic_exchange(&pacer->window_gpu_ns, total)); /* refunds may exceed it */
    atomic_store(&pacer->window_share, start && used > 0 ? (uint64_t)used * 1000 / (now - start) : 0);
}

/* Launches that have ended by now pay their real time. Otherwise they would pay until another process notices that this
 * process is gone. Runs before the driver's own exit handler, which was registered earlier. */
static void settle_at_exit(void) {
    struct vgpu_local *local = vgpu_local();
    const uint64_t until = vgpu_now_ns() + EXIT_WAIT_NS;
    if (!local || !atomic_load_explicit(&local->enforced, memory_order_acquire) ||
        !atomic_load(&vgpu_samples_outstanding))
        return;
    while (vgpu_samples_collect(vgpu_settle_sample, false) && vgpu_now_ns() < until)
        vgpu_sleep_until(vgpu_now_ns() + CARRY_NS);
}

/* GPU time of a launch. While little is known, a launch pays at least the time that similar or unknown launches have
 * been under way. So a flood of launches slows itself down. A settled estimate is doubted only if they have been under
 * way for longer than paid launches can queue. */
static uint64_t expected(const struct vgpu_cost *cost, bool settled, unsigned card, uint64_t now) {
    const bool known = vgpu_cost_known(cost);
    const uint64_t bound = atomic_load_explicit(&cost->bound_ns, memory_order_relaxed);
    const uint64_t mean = known   ? atomic_load_explicit(&cost->mean_ns, memory_order_relaxed)
                          : bound ? bound
                                  : FIRST_GUESS_NS;
    uint64_t age = vgpu_cost_age(cost, now);
    if (!vgpu_cost_sure(cost)) {
        const uint64_t unknown = vgpu_unknown_age(card, now);
        age = unknown > age ? unknown : age;
    }
    if (settled)
        age = age > QUEUED_NS ? age - QUEUED_NS : 0;
    return age > mean ? age : mean;
}

/* Whether this launch is measured, and how its sample counts. */
static bool chosen(struct vgpu_cost *cost, unsigned card, uint64_t reserved_ns, bool first_of_two,
                   enum vgpu_sample_kind *kind) {
    *kind = VGPU_SAMPLE_SETTLES;
    /* because few launches may belong to an unusual estimate */
    const bool settled = atomic_load_explicit(&cost->samples, memory_order_relaxed) >= VGPU_COST_SETTLED;
    if (!settled || reserved_ns > atomic_load_explicit(&cost->mean_ns, memory_order_relaxed) ||
        reserved_ns >= VGPU_LONG_RUN_NS || atomic_load_explicit(&vgpu_measure_all, memory_order_relaxed))
        return true;
    *kind = VGPU_SAMPLE_LEARNS;
    if (vgpu_inspecting(card)) {
        *kind = VGPU_SAMPLE_INSPECTS;
        return true;
    }
    int32_t left = atomic_load_explicit(&vgpu_series_left, memory_order_relaxed);
    if (left > 0 && (left = atomic_fetch_sub(&vgpu_series_left, 1)) > 0) {
        if (left > (int32_t)(VGPU_SERIES - VGPU_SERIES_COVERS))
            *kind = VGPU_SAMPLE_COVERS;
        return true;
    }
    if (vgpu_self.until_sample > 0)
        return false;
    if (first_of_two)
        return false;
    vgpu_thread_draw(settled);
    vgpu_self.coupled = false;
    if (!vgpu_sources_several())
        return true;
    vgpu_series_begin();
    *kind = VGPU_SAMPLE_COVERS;
    return true;
}

/* Pays for a launch of `cost_ns`. A short launch also pays for some later ones; the first of a couple also pays for the
 * second. */
static void pay(const struct vgpu_place *place, const struct vgpu_pace *share, uint64_t cost_ns, bool is_short,
                bool couple, uint64_t now) {
    uint64_t amount = couple ? 2 * cost_ns : cost_ns;
    if (vgpu_prepaid.left_ns >= cost_ns)
        return;
    if (is_short) {
        const uint64_t batch = vgpu_self.batch_ns * 2 < BATCH_NS ? vgpu_self.batch_ns * 2 : BATCH_NS;
        vgpu_self.batch_ns = batch > cost_ns ? batch : cost_ns;
        amount = vgpu_self.batch_ns;
    }
    struct vgpu_turn turn = vgpu_turn_reserve(place->card, amount, share, now);
    vgpu_inspect_paid(place->card, amount, turn.start > now ? turn.start : now);
    if (couple)
        turn.start += vgpu_gcra_price(cost_ns, share->percent);
    if (turn.start > now + CARRY_NS)
        vgpu_turn_await(turn, place);
    vgpu_prepaid.left_ns += amount;
}

/* Pays the same on the other cards of the launch, where it runs as long: no event can be recorded there. */
static void pay_others(const struct vgpu_limits *limits, const struct vgpu_launch *launch) {
    for (uint32_t others = launch->others; others; others &= others - 1) {
        const struct vgpu_place place = {.card = (unsigned)__builtin_ctz(others), .device = VGPU_NO_DEVICE};
        const uint64_t now = vgpu_now_ns();
        const struct vgpu_pace share = vgpu_pace_now(limits, &place, now);
        vgpu_settle_refunds(place.card, &share, now);
        if (!share.percent) {
            vgpu_pacer_wants(place.card, now, launch->reserved_ns);
            continue;
        }
        const struct vgpu_turn turn = vgpu_turn_reserve(place.card, launch->reserved_ns, &share, now);
        if (turn.start > now + CARRY_NS)
            vgpu_turn_await(turn, &place);
    }
}

/* One launch that looks up, on its way through the steps below. */
struct step {
    struct vgpu_place place;
    CUstream stream;
    struct vgpu_pace share;
    struct vgpu_cost *cost;
    uint64_t now;
    bool settled;  /* the mean of its kind is known well */
    bool first;    /* its kind is unknown: others wait until this launch has been measured */
    bool is_short; /* it also pays for some later launches */
    bool second;   /* the launch before was made to put this launch right behind it */
};

/* Settles results of earlier launches, and charges what ended processes still owe. */
static void catch_up(struct step *step, const struct vgpu_limits *limits) {
    const unsigned card = step->place.card;
    const int results = atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed);
    const bool rarely = step->settled && results <= FEW && vgpu_self.interval_ns < VGPU_FAST_NS;
    if (results && step->now - vgpu_self.collected_ns > (rarely ? COLLECT_RARELY_NS : COLLECT_EVERY_NS)) {
        vgpu_self.collected_ns = step->now;
        vgpu_samples_collect(vgpu_settle_sample, false);
    }
    vgpu_contention_update(card, step->now);
    vgpu_reap(REAP_EVERY_MS);
    step->share = vgpu_pace_now(limits, &step->place, step->now);
    const uint32_t percent = step->share.percent;
    vgpu_settle_refunds(card, &step->share, step->now);
    const uint64_t missed = vgpu_contention_missed(card);
    if (missed && percent)
        vgpu_settle_missed(card, percent, (int64_t)missed);
    const int64_t hidden = vgpu_inspect_turn(card, step->now);
    if (hidden)
        vgpu_settle_missed(card, percent, hidden);
}

/* While the kind is unknown: loads its code, so that the loading is not measured, and waits for the first measured
 * launch. */
static void wait_for_first(struct step *step, CUfunction function) {
    if (!vgpu_cost_known(step->cost) && !atomic_load_explicit(&step->cost->flying, memory_order_relaxed))
        vgpu_code_load(function, step->place.context);
    if (!step->share.percent || atomic_load_explicit(&step->cost->samples, memory_order_relaxed) > 1)
        return;
    vgpu_first_sample_await(step->cost);
    step->first = !vgpu_cost_sure(step->cost) && vgpu_unknown_await(step->place.card);
    step->now = vgpu_now_ns();
}

/* Sets the price. Also decides whether the launch pays for others: for later short launches, or for one right behind
 * it. */
static bool set_price(struct step *step, struct vgpu_launch *launch) {
    const bool inspected = vgpu_inspecting(step->place.card);
    if (step->share.percent)
        launch->reserved_ns = expected(step->cost, step->settled, step->place.card, step->now);
    else
        launch->reserved_ns =
            vgpu_cost_known(step->cost) ? atomic_load_explicit(&step->cost->mean_ns, memory_order_relaxed) : 0;
    step->is_short = step->settled && !inspected && launch->reserved_ns <= BATCH_NS / 2 && !launch->others;
    /* With neighbours on the card, only a launch right behind another launch of this process surely contains none of
     * their work. */
    step->second = vgpu_self.coupled;
    const bool couple = !step->second && step->settled && !step->is_short && !inspected &&
                        launch->reserved_ns < VGPU_LONG_RUN_NS && vgpu_self.until_sample <= 0 &&
                        !vgpu_sources_several() && vgpu_contention_company(step->place.card) == VGPU_SHARING;
    vgpu_self.coupled |= couple;
    return couple;
}

static void pay_price(struct step *step, const struct vgpu_limits *limits, struct vgpu_launch *launch, bool couple) {
    const bool paced = step->share.percent;
    if (vgpu_self.unpaced && paced)
        vgpu_prepaid.left_ns = 0;
    vgpu_self.unpaced = !paced;
    if (paced) {
        pay(&step->place, &step->share, launch->reserved_ns, step->is_short, couple, step->now);
    } else {
        /* the arbiter may begin to pace at any time, without changing a value that a launch reads */
        vgpu_prepaid.left_ns = step->share.moves ? BATCH_NS : COUNTED_NS;
        vgpu_pacer_wants(step->place.card, step->now, launch->reserved_ns);
    }
    if (launch->others)
        pay_others(limits, launch);
}

/* False: the launch should be measured, and there is no memory for it. */
static bool measure(struct vgpu_launch *launch, const struct step *step) {
    static atomic_bool announced;
    const bool first_of_two = vgpu_self.coupled && !step->second;
    struct vgpu_cost *cost = step->cost;
    enum vgpu_sample_kind kind;
    if (!chosen(cost, launch->card, launch->reserved_ns, first_of_two, &kind))
        return true;
    struct vgpu_sample *sample =
        vgpu_sample_begin(step->place.context, step->stream, kind != VGPU_SAMPLE_LEARNS || vgpu_sources_watches());
    if (!sample)
        return kind != VGPU_SAMPLE_SETTLES;
    vgpu_cost_flies(cost, sample->recorded_ns);
    sample->cost = cost;
    sample->kind = kind;
    sample->meaning = atomic_load_explicit(&cost->meaning, memory_order_relaxed);
    sample->reserved_ns = launch->reserved_ns;
    sample->apart_ns = vgpu_self.interval_ns;
    sample->limit = launch->limit;
    sample->card = launch->card;
    sample->others = launch->others;
    sample->spent_ns = vgpu_contention_spent(launch->card);
    sample->first = step->first;
    sample->unknown = !vgpu_cost_sure(cost);
    if (sample->unknown) {
        vgpu_owed_begin(launch->card, sample->launched_ns);
        if (!atomic_exchange(&announced, true))
            atexit(settle_at_exit);
    }
    launch->sample = sample;
    return true;
}

/* Keeps the rest of the payment, and the launches that it covers: vgpu_prepaid_covers. */
static void keep_rest(const struct step *step, const struct vgpu_launch *launch, uint64_t key) {
    vgpu_prepaid.left_ns = vgpu_prepaid.left_ns > launch->reserved_ns ? vgpu_prepaid.left_ns - launch->reserved_ns : 0;
    vgpu_self.filled_ns = vgpu_prepaid.left_ns;
    vgpu_self.filled = vgpu_prepaid.left = vgpu_thread_ahead();
    __typeof__(vgpu_prepaid.known[0]) *known = &vgpu_prepaid.known[vgpu_prepaid_place(key)];
    if (step->is_short) {
        known->key = key;
        known->cost = step->cost;
    } else if (known->key == key) {
        known->key = 0; /* the launch is not short any more */
    }
}

/* A launch that must look up: the thread has paid nothing in advance, or its time to look up has come. False: there is
 * no memory to measure the launch. */
static __attribute__((noinline)) bool paid(struct vgpu_launch *launch, uint64_t key, CUstream stream, uint32_t others) {
    struct step step = {.stream = stream};
    const struct vgpu_limits *limits = vgpu_limits_now();
    const CUfunction function = launch->function;
    *launch = (struct vgpu_launch){.counted = false};
    if (!limits || !vgpu_place_of_stream(stream, &step.place) || step.place.card >= limits->card_count)
        return true;
    const unsigned card = step.place.card;
    if (vgpu_capturing(stream)) { /* a captured launch costs nothing: the launch of its graph will pay */
        vgpu_graph_cards_captured(stream, card);
        return true;
    }
    const int kept = errno;
    step.now = vgpu_now_ns();
    vgpu_thread_look_up(card, key, stream, step.now);
    step.cost = vgpu_cost_of(key);
    step.settled = atomic_load_explicit(&step.cost->samples, memory_order_relaxed) >= VGPU_COST_SETTLED;
    catch_up(&step, limits);
    launch->counted = true;
    launch->card = card;
    launch->others = others & ~(1u << card) & ((1u << limits->card_count) - 1);
    launch->limit = step.share.percent;

    wait_for_first(&step, function);
    const bool couple = set_price(&step, launch);
    pay_price(&step, limits, launch, couple);
    const bool measured = measure(launch, &step);
    if (step.first && !launch->sample)
        vgpu_unknown_end(card);
    if (launch->limit && !launch->sample) {
        vgpu_inspect_unmeasured(card);
        vgpu_owed_mark(&step.place, stream, step.now);
    }
    keep_rest(&step, launch, key);
    errno = kept;
    return measured;
}

bool vgpu_pacer_before_on(struct vgpu_launch *launch, uint64_t key, CUstream stream, uint32_t others) {
    const enum vgpu_mode mode = vgpu_enforcement();
    launch->counted = false;
    if (mode == VGPU_UNLIMITED)
        return true;
    if (mode == VGPU_BROKEN)
        return false;
    if (!others && prepaid_here(key, stream))
        return true;
    if (paid(launch, key, stream, others))
        return true;
    launch->counted = false;
    return false;
}

bool vgpu_pacer_before(struct vgpu_launch *launch, uint64_t key, CUstream stream) {
    return vgpu_pacer_before_on(launch, key, stream, 0);
}

CUresult vgpu_pacer_settle(struct vgpu_launch *launch, CUresult result) {
    const int kept = errno;
    if (launch->sample)
        vgpu_sample_end(launch->sample, result == CUDA_SUCCESS);
    for (uint32_t cards = launch->others | 1u << launch->card; cards; cards &= cards - 1) {
        const unsigned card = (unsigned)__builtin_ctz(cards);
        struct vgpu_pacer_card *pacer = vgpu_pacer_shared(card);
        const uint32_t percent =
            card == launch->card ? launch->limit : atomic_load_explicit(&pacer->percent, memory_order_relaxed);
        if (result == CUDA_SUCCESS) {
            vgpu_settle_account(card, (int64_t)launch->reserved_ns, 1);
            turn_window(pacer, vgpu_self.looked_ns);
        } else if (percent) {
            vgpu_settle_price(pacer, -(int64_t)vgpu_gcra_price(launch->reserved_ns, percent));
        }
    }
    errno = kept;
    return result;
}

void vgpu_pacer_waits(struct vgpu_wait *wait) {
    const enum vgpu_mode mode = vgpu_enforcement();
    wait->begun_ns = 0;
    if ((mode == VGPU_REGION || mode == VGPU_PRIVATE) && vgpu_prepaid.epoch)
        vgpu_inspect_wait(wait, vgpu_self.card, vgpu_now_ns());
}

void vgpu_pacer_waited_for(const struct vgpu_wait *wait) {
    vgpu_pacer_waited();
    if (!wait->begun_ns)
        return;
    const int kept = errno;
    vgpu_owed_look();
    const uint32_t percent = atomic_load_explicit(&vgpu_pacer_shared(vgpu_self.card)->percent, memory_order_relaxed);
    const uint64_t unexplained =
        atomic_load(&vgpu_samples_outstanding) ? 0 : vgpu_inspect_waited(wait, vgpu_self.card, vgpu_now_ns());
    if (unexplained) {
        atomic_fetch_add(&vgpu_prepaid_epoch, 1);
        vgpu_settle_missed(vgpu_self.card, percent, (int64_t)unexplained);
    }
    errno = kept;
}

void vgpu_pacer_look(void) {
    const int kept = errno;
    if (vgpu_enforcement() == VGPU_REGION || vgpu_enforcement() == VGPU_PRIVATE)
        vgpu_samples_collect(vgpu_settle_sample, true);
    errno = kept;
}

unsigned vgpu_pacer_utilization(unsigned card) {
    struct vgpu_pacer_card *pacer = vgpu_pacer_shared(card);
    uint64_t now = vgpu_now_ns(), start = atomic_load(&pacer->window_start),
             permille = atomic_load(&pacer->window_share);
    if (start && now - start > WINDOW_NS) { /* no launch since then: use the current window so far */
        int64_t used = (int64_t)(atomic_load(&pacer->gpu_ns) - atomic_load(&pacer->window_gpu_ns));
        permille = used > 0 ? (uint64_t)used * 1000 / (now - start) : 0;
    }
    return permille >= 1000 ? 100 : (unsigned)((permille + 5) / 10);
}
