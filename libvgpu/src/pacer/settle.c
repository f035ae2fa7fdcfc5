/* Corrects what launches paid in advance, by measurements and by the arbiter's refunds. Also lets launches wait for
 * their start. */
#define _GNU_SOURCE
#include "pacer/settle.h"

#include "base/clock.h"
#include "ledger/ledger.h"
#include "pacer/busy_intervals.h"
#include "pacer/contention.h"
#include "pacer/inspect.h"
#include "pacer/owed.h"
#include "pacer/pacer.h"
#include "region/gcra.h"

#define LATEST_REFUND_NS 2000000000u
/* overdrafts by neighbours or by earlier launches are made up for no further than this */
#define LONGEST_ARREARS_NS 2000000000u
/* a launch carries shorter waits over to the next launch: a sleep overshoots by about that much */
#define CARRY_NS 60000u
#define POLL_NS 1000000u  /* while results are outstanding, a sleeping launch checks for credit this often */
#define LOOK_NS 10000000u /* and for a new share this often */
#define LONGEST_WANT_NS 100000000u
/* spoilt measurements in a row: a busy host spoils one now and then; a driver whose launches return late spoils all */
#define MOST_SPOILT 8u

/* Refunded GPU time that does not fit into tat, because credit reaches back no further than a burst. A neighbour's long
 * launch is refunded only when it has ended, so a refund may exceed a burst. */
static _Atomic uint64_t kept_ns[VGPU_MAX_CARDS];

void vgpu_settle_forget(void) {
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        atomic_store(&kept_ns[card], 0);
}

struct vgpu_pacer_card *vgpu_pacer_shared(unsigned card) {
    return &vgpu_mapping()->usage->pacer[card];
}

void vgpu_settle_price(struct vgpu_pacer_card *pacer, int64_t price) {
    vgpu_gcra_settle(&pacer->tat, price);
    atomic_fetch_sub(&pacer->credited_ns, (uint64_t)price);
}

/* A launch pays its real time. The total overdraft is bounded only where neighbours may have used the time and no
 * arbiter gives it back. */
static void settle_debit(unsigned card, uint64_t price) {
    struct vgpu_pacer_card *pacer = vgpu_pacer_shared(card);
    const uint64_t now = vgpu_now_ns(), latest = now + (price > LONGEST_ARREARS_NS ? price : LONGEST_ARREARS_NS);
    const uint64_t tat = atomic_load_explicit(&pacer->tat, memory_order_relaxed);
    if (vgpu_contention_company(card) != VGPU_SHARING || vgpu_arbiter_lives(card, now))
        vgpu_settle_price(pacer, (int64_t)price);
    else if (tat < latest)
        vgpu_settle_price(pacer, (int64_t)(latest - tat < price ? latest - tat : price));
}

void vgpu_settle_account(unsigned card, int64_t gpu_ns, uint64_t launches) {
    vgpu_count_gpu_time(card, (uint64_t)gpu_ns, launches);
    vgpu_contention_own(card, gpu_ns);
    vgpu_owed_paid(card, gpu_ns);
}

/* What a launch must pay on top of its payment; negative: gets back. A bounded launch does not pay again what other
 * launches of the process paid meanwhile: together they took no more than the time that has passed. */
static int64_t difference_of(const struct vgpu_sample *sample, const struct vgpu_measure *measure, unsigned card,
                             uint64_t busy) {
    const int64_t difference = (int64_t)busy - (int64_t)sample->reserved_ns;
    if (!measure->bounded)
        return difference;
    if (difference <= 0) { /* no refund, but for time that the launch cannot have used since its start */
        const uint64_t longest = measure->end_ns - sample->recorded_ns;
        return measure->partly || !vgpu_sample_settles(sample) || sample->reserved_ns <= longest
                   ? 0
                   : (int64_t)longest - (int64_t)sample->reserved_ns;
    }
    const int64_t rest = (int64_t)busy - (int64_t)(vgpu_contention_spent(card) - sample->spent_ns);
    return rest < 0 ? 0 : rest < difference ? rest : difference;
}

static void settle_on(unsigned card, uint32_t percent, int64_t difference) {
    vgpu_settle_account(card, difference, 0);
    if (!percent || !difference)
        return;
    if (difference > 0)
        settle_debit(card, vgpu_gcra_price((uint64_t)difference, percent));
    else
        vgpu_settle_price(vgpu_pacer_shared(card), -(int64_t)vgpu_gcra_price((uint64_t)-difference, percent));
}

void vgpu_settle_missed(unsigned card, uint32_t percent, int64_t gpu_ns) {
    settle_on(card, percent, gpu_ns);
}

static void learn(const struct vgpu_sample *sample, const struct vgpu_measure *measure) {
    if (measure->partly || sample->meaning != atomic_load_explicit(&sample->cost->meaning, memory_order_relaxed))
        return;
    if (vgpu_measure_teaches(measure))
        vgpu_cost_learn(sample->cost, vgpu_contention_scaled(sample->card, measure->took_ns),
                        vgpu_contention_company(sample->card), measure->queued);
    else if (!vgpu_cost_known(sample->cost))
        vgpu_cost_bounded(sample->cost, measure->end_ns - sample->recorded_ns);
    else if (measure->least_ns >= VGPU_LONG_RUN_NS &&
             measure->least_ns / 2 > atomic_load_explicit(&sample->cost->mean_ns, memory_order_relaxed))
        vgpu_cost_refuted(sample->cost);
}

/* A randomly measured launch that took far longer than it paid. */
static bool is_unlike(const struct vgpu_sample *sample, const struct vgpu_measure *measure, uint64_t busy) {
    return sample->kind == VGPU_SAMPLE_LEARNS && sample->limit && !measure->bounded && !measure->spoilt &&
           vgpu_cost_known(sample->cost) &&
           vgpu_inspect_sample(sample->card, busy, atomic_load_explicit(&sample->cost->mean_ns, memory_order_relaxed),
                               vgpu_now_ns());
}

/* For a spoilt measurement: whether the payment (the mean of exact samples) is the better guess. */
static bool paid_enough(const struct vgpu_sample *sample, const struct vgpu_measure *measure) {
    if (!measure->spoilt && !measure->bounded)
        atomic_store_explicit(&sample->cost->spoilt, 0, memory_order_relaxed);
    if (!measure->spoilt || measure->bounded || !vgpu_cost_known(sample->cost))
        return false;
    const uint32_t before = atomic_fetch_add_explicit(&sample->cost->spoilt, 1, memory_order_relaxed);
    return before < MOST_SPOILT && !vgpu_measure_refutes(measure, sample);
}

void vgpu_settle_sample(struct vgpu_sample *sample, const struct vgpu_measure *measure) {
    const uint64_t whole = measure->end_ns - measure->begin_ns;
    if (sample->kind == VGPU_SAMPLE_COVERS && !measure->bounded)
        return;
    const bool enough = paid_enough(sample, measure);
    uint64_t busy = vgpu_contention_scaled(sample->card, measure->bounded ? measure->fresh_ns : measure->took_ns);
    const bool unlike = is_unlike(sample, measure, busy);
    if (!unlike && sample->kind != VGPU_SAMPLE_INSPECTS)
        learn(sample, measure);
    if (enough || (!unlike && !vgpu_sample_settles(sample) && !measure->bounded))
        return;
    if (sample->kind == VGPU_SAMPLE_INSPECTS)
        vgpu_inspect_found(sample->card, busy, sample->reserved_ns);
    /* a bounded launch that pays nothing leaves its interval to launches that pay */
    if (whole >= VGPU_LONG_RUN_NS && (!measure->bounded || difference_of(sample, measure, sample->card, busy) > 0)) {
        const uint64_t alone = vgpu_busy_publish(vgpu_pacer_shared(sample->card), measure->begin_ns, measure->end_ns);
        busy = alone < busy ? alone : busy; /* another process of the container has paid for the rest */
    }
    settle_on(sample->card, sample->limit, difference_of(sample, measure, sample->card, busy));
    for (uint32_t others = sample->others; others; others &= others - 1) {
        const unsigned card = (unsigned)__builtin_ctz(others);
        settle_on(card, atomic_load_explicit(&vgpu_pacer_shared(card)->percent, memory_order_relaxed),
                  measure->partly && busy < sample->reserved_ns ? 0 : (int64_t)busy - (int64_t)sample->reserved_ns);
    }
    if (measure->bounded)
        sample->spent_ns = vgpu_contention_spent(sample->card);
}

/* Credit reaches back no further than this. */
static uint64_t credit_floor(const struct vgpu_pace *share, uint64_t now) {
    return now > share->burst_ns ? now - share->burst_ns : 0;
}

void vgpu_settle_refunds(unsigned card, const struct vgpu_pace *share, uint64_t now) {
    const struct vgpu_limits_file *file = vgpu_mapping()->limits;
    struct vgpu_pacer_card *pacer = vgpu_pacer_shared(card);
    uint64_t granted = atomic_load_explicit(&file->arbiter[card].refund_ns, memory_order_relaxed);
    uint64_t taken = atomic_load_explicit(&pacer->refund_taken, memory_order_relaxed);
    if (granted == taken || !atomic_compare_exchange_strong(&pacer->refund_taken, &taken, granted) || granted < taken)
        return;
    uint64_t refund = granted - taken < LATEST_REFUND_NS ? granted - taken : LATEST_REFUND_NS;
    vgpu_settle_account(card, -(int64_t)refund, 0);
    if (!share->percent)
        return;
    const uint64_t tat = atomic_load_explicit(&pacer->tat, memory_order_relaxed), floor = credit_floor(share, now),
                   room = tat > floor ? tat - floor : 0, price = vgpu_gcra_price(refund, share->percent);
    vgpu_settle_price(pacer, -(int64_t)(price < room ? price : room));
    if (price > room)
        atomic_fetch_add(&kept_ns[card], (price - room) * share->percent / 100);
}

/* The kept refund pays first. While the container uses less than its share, the kept refund expires like credit. */
static uint64_t pay_from_kept(unsigned card, uint64_t gpu_ns, const struct vgpu_pace *share, uint64_t now) {
    const uint64_t tat = atomic_load_explicit(&vgpu_pacer_shared(card)->tat, memory_order_relaxed),
                   floor = credit_floor(share, now), unused = tat < floor ? (floor - tat) * share->percent / 100 : 0;
    uint64_t kept = atomic_load_explicit(&kept_ns[card], memory_order_relaxed), left, paid;
    do {
        if (!kept)
            return gpu_ns;
        left = kept > unused ? kept - unused : 0;
        paid = left < gpu_ns ? left : gpu_ns;
    } while (!atomic_compare_exchange_weak(&kept_ns[card], &kept, left - paid));
    return gpu_ns - paid;
}

/* For the arbiter: this container has, or will have, work until `when`. */
static void want(struct vgpu_pacer_card *pacer, uint64_t when) {
    uint64_t seen = atomic_load_explicit(&pacer->wanted_until, memory_order_relaxed);
    while (seen < when && !atomic_compare_exchange_weak_explicit(&pacer->wanted_until, &seen, when,
                                                                 memory_order_relaxed, memory_order_relaxed))
        ;
}

void vgpu_pacer_wants(unsigned card, uint64_t start, uint64_t gpu_ns) {
    want(vgpu_pacer_shared(card), start + (gpu_ns < LONGEST_WANT_NS ? gpu_ns : LONGEST_WANT_NS));
}

/* tat was computed with another share. One of the racing processes recomputes the part after now; each waiting launch
 * does the same for its own start. */
static void adopt(struct vgpu_pacer_card *pacer, uint32_t percent, uint64_t now) {
    uint32_t before = atomic_load_explicit(&pacer->percent, memory_order_relaxed);
    if (before == percent || !atomic_compare_exchange_strong(&pacer->percent, &before, percent) || !before)
        return;
    uint64_t tat = atomic_load_explicit(&pacer->tat, memory_order_relaxed);
    while (tat > now && !atomic_compare_exchange_weak(&pacer->tat, &tat, now + (tat - now) * before / percent))
        ;
}

struct vgpu_turn vgpu_turn_reserve(unsigned card, uint64_t gpu_ns, const struct vgpu_pace *share, uint64_t now) {
    struct vgpu_pacer_card *pacer = vgpu_pacer_shared(card);
    adopt(pacer, share->percent, now);
    struct vgpu_turn turn = {.credited_ns = atomic_load(&pacer->credited_ns), .percent = share->percent};
    const uint64_t price = vgpu_gcra_price(pay_from_kept(card, gpu_ns, share, now), share->percent);
    turn.start = vgpu_gcra_reserve(&pacer->tat, now, price, share->burst_ns);
    /* the container gives way: the paid work comes at the end of the paid time, not at its beginning */
    if (!share->burst_ns)
        turn.start += price;
    vgpu_pacer_wants(card, turn.start > now ? turn.start : now, gpu_ns);
    return turn;
}

void vgpu_turn_await(struct vgpu_turn turn, const struct vgpu_place *place) {
    struct vgpu_pacer_card *pacer = vgpu_pacer_shared(place->card);
    uint64_t begun = vgpu_now_ns(), now = begun;
    for (;;) {
        const struct vgpu_limits *limits = vgpu_limits_now();
        if (!limits)
            break;
        struct vgpu_pace share = vgpu_pace_now(limits, place, now);
        vgpu_settle_refunds(place->card, &share, now);
        /* debits since then belong to later launches */
        const int64_t credit = (int64_t)(atomic_load(&pacer->credited_ns) - turn.credited_ns);
        uint64_t start = credit <= 0 ? turn.start : turn.start > (uint64_t)credit ? turn.start - (uint64_t)credit : 0;
        if (start > now && share.percent != turn.percent) {
            adopt(pacer, share.percent ? share.percent : 100, now); /* no longer paced: use the rate of a whole card */
            start = share.percent ? now + (start - now) * turn.percent / share.percent : now;
            turn = (struct vgpu_turn){.start = start,
                                      .credited_ns = turn.credited_ns + (credit > 0 ? (uint64_t)credit : 0),
                                      .percent = share.percent};
        }
        if (start <= now + CARRY_NS)
            break;
        bool outstanding = vgpu_samples_collect(vgpu_settle_sample, false);
        uint64_t step = outstanding ? POLL_NS : share.moves ? LOOK_NS : UINT64_MAX;
        vgpu_sleep_until(start - now > step ? now + step : start);
        now = vgpu_now_ns();
    }
    if (now > begun)
        vgpu_count_throttled(place->card, now - begun);
}
