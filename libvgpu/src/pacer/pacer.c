/* Makes each launch pay, wait for its start, and be measured. */
#define _GNU_SOURCE
#include "pacer/pacer.h"

#include <errno.h>
#include <pthread.h>
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
#include "pacer/owed.h"
#include "pacer/prepaid.h"
#include "pacer/settle.h"
#include "region/gcra.h"
#include "reserves/capture.h"

/* shorter waits are carried over to the next launch: a sleep overshoots by about that much */
#define CARRY_NS 60000u
#define FIRST_GUESS_NS 50000u /* price of a launch of which nothing is known */
#define QUEUED_NS 200000000u  /* a launch that has been under way for longer was not paid for */
/* longest wait of a process that ends for what it has under way, and of which nothing is known */
#define EXIT_WAIT_NS 100000000u
#define REAP_EVERY_MS 250u
#define SAMPLE_EVERY_NS 2000000u /* one measurement per thread and this time, on average */
#define FEWEST_SAMPLES 8192u     /* but one in so many launches */
#define FIRST_DISTANCE 16u       /* launches of a new thread before its first measurement, at most */
/* mean time between launches below which measurements, of some microseconds each, have to be rare */
#define FAST_NS 5000u
/* GPU time that a thread pays in advance at most, and so keeps to itself before it is counted for all to see */
#define BATCH_NS 50000u
#define COUNTED_NS 1000000u   /* where there is no limit: GPU time that it keeps to itself at most */
#define BATCH_LAUNCHES 64u    /* after so many a thread looks up again */
#define LOOK_EVERY_NS 100000u /* one that launches fast after this time */
#define MOST_LAUNCHES 512u
#define BATCH_IDLE_NS 10000000u     /* a thread that launches less often pays one by one */
#define COLLECT_EVERY_NS 100000u    /* asking the driver takes about a microsecond */
#define COLLECT_RARELY_NS 20000000u /* where launches are fast, and few results wait that nobody needs soon */
#define FEW 4
#define WINDOW_NS 500000000u

/* What a thread has paid in advance, and remembers to spend it fast. What is left dies with the thread: at most
 * BATCH_NS, and at most about as much as the thread has spent in its last BATCH_IDLE_NS. Where there is no limit
 * nothing is paid, and up to COUNTED_NS are spent in the same way; they are no credit when a limit comes. A forked
 * child starts without (epoch). */
__thread __attribute__((tls_model("initial-exec"))) struct vgpu_prepaid vgpu_prepaid;
static __thread __attribute__((tls_model("initial-exec"))) struct {
    unsigned card;
    uint32_t filled; /* left and left_ns when it last looked up */
    uint64_t filled_ns;
    uint64_t batch_ns;    /* what it paid the last time */
    uint64_t looked_ns;   /* CLOCK_MONOTONIC of that */
    uint64_t interval_ns; /* mean time between launches */
    uint64_t recent_ns;   /* sums that forget, as the quotient of which it comes; launches in sixteenths */
    uint64_t recent_launches;
    uint64_t collected_ns; /* when it last asked for results */
    uint64_t random;
    int64_t until_sample; /* launches */
    bool unpaced;         /* left_ns was not paid: it says how much more may go uncounted */
    bool coupled;         /* the next launch is paid and follows at once, to be measured */
} thread;

_Atomic uint32_t vgpu_prepaid_epoch = 1;
_Atomic uint8_t vgpu_one_card;

void vgpu_pacer_forget(void) {
    atomic_fetch_add(&vgpu_prepaid_epoch, 1);
    vgpu_crowd_forget();
}

void vgpu_pacer_stale(uint64_t key) {
    vgpu_cost_doubt(key);
    atomic_fetch_add(&vgpu_prepaid_epoch, 1);
}

static void ask_for_cards(void) {
    int count = 0;
    if (DRIVER(cuDeviceGetCount) && DRIVER(cuDeviceGetCount)(&count) == CUDA_SUCCESS)
        atomic_store(&vgpu_one_card, count != 1             ? VGPU_SEVERAL_CARDS
                                     : vgpu_gate_is_armed() ? VGPU_ONE_CARD_GATED
                                                            : VGPU_ONE_CARD);
}

static uint64_t limits_selector(void) {
    return atomic_load_explicit(&vgpu_mapped.limits->selector, memory_order_relaxed);
}

/* Among several cards: only a launch on the one that the thread has paid on is paid. */
static bool prepaid_here(uint64_t key, CUstream stream) {
    struct vgpu_place place;
    uint64_t price;
    if (atomic_load_explicit(&vgpu_one_card, memory_order_relaxed) || !vgpu_prepaid_covers(key, &price) ||
        !vgpu_place_of_stream(stream, &place) || place.card != thread.card)
        return false;
    vgpu_prepaid_spend(price, stream);
    return true;
}

/* Closes the utilisation window when it is old enough; one of the racing processes does it. */
static void turn_window(struct vgpu_pacer_card *pacer, uint64_t now) {
    uint64_t start = atomic_load_explicit(&pacer->window_start, memory_order_relaxed);
    if (now - start < WINDOW_NS || !atomic_compare_exchange_strong(&pacer->window_start, &start, now))
        return;
    uint64_t total = atomic_load(&pacer->gpu_ns);
    int64_t used = (int64_t)(total - atomic_exchange(&pacer->window_gpu_ns, total)); /* refunds may exceed it */
    atomic_store(&pacer->window_share, start && used > 0 ? (uint64_t)used * 1000 / (now - start) : 0);
}

/* Counts for all to see what the thread has launched since it last did; returns how many. */
static uint32_t count_prepaid(void) {
    const uint32_t launches = thread.filled - vgpu_prepaid.left;
    if (!launches)
        return 0;
    const uint64_t gpu_ns = thread.filled_ns - vgpu_prepaid.left_ns;
    vgpu_settle_account(thread.card, (int64_t)gpu_ns, launches);
    thread.filled = vgpu_prepaid.left;
    thread.filled_ns = vgpu_prepaid.left_ns;
    return launches;
}

/* The last look of a thread that ends. A forked child that never asked how it is limited has nothing but its parent's
 * numbers. */
static void end_thread(void *unused) {
    (void)unused;
    struct vgpu_local *local = vgpu_local();
    if (local && atomic_load_explicit(&local->enforced, memory_order_acquire) &&
        vgpu_prepaid.epoch == atomic_load(&vgpu_prepaid_epoch))
        count_prepaid();
}

static void end_one_thread(void *unused) {
    end_thread(unused);
    vgpu_samples_stream_going(CU_STREAM_PER_THREAD);
}

/* What has ended by now is paid as it was, not as long as until somebody notices that the process is gone. Before the
 * driver's own end, which was announced earlier. */
static void settle_at_exit(void) {
    struct vgpu_local *local = vgpu_local();
    const uint64_t until = vgpu_now_ns() + EXIT_WAIT_NS;
    if (!local || !atomic_load_explicit(&local->enforced, memory_order_acquire) ||
        !atomic_load(&vgpu_samples_outstanding))
        return;
    while (vgpu_samples_collect(vgpu_settle_sample, false) && vgpu_now_ns() < until)
        vgpu_sleep_until(vgpu_now_ns() + CARRY_NS);
}

/* Weak: before glibc 2.34 they are in libpthread, which this library does not bring into programs that have no threads.
 */
#pragma weak pthread_key_create
#pragma weak pthread_setspecific
static pthread_key_t ending;

/* Has end_thread called for the calling thread. The key is made by whoever comes first; who comes meanwhile does
 * without. */
static void announce_end(void) {
    static atomic_int state; /* 0: no key yet, 1: being made, or there is none to be had, 2: there */
    int none = 0;
    if (pthread_key_create && pthread_setspecific && atomic_compare_exchange_strong(&state, &none, 1) &&
        pthread_key_create(&ending, end_one_thread) == 0)
        atomic_store(&state, 2);
    if (atomic_load(&state) == 2)
        pthread_setspecific(ending, &thread);
}

/* The thread that ends the process gets no call for its key. */
__attribute__((destructor)) static void end_process(void) {
    end_thread(NULL);
}

/* The thread looks up: counts what it has launched since the last time, and forgets what is no longer valid. */
static void look_up(unsigned card, uint64_t key, CUstream stream, uint64_t now) {
    uint32_t current = atomic_load_explicit(&vgpu_prepaid_epoch, memory_order_relaxed);
    if (vgpu_prepaid.epoch == current) {
        const uint32_t launches = count_prepaid();
        thread.recent_ns += now - thread.looked_ns - thread.recent_ns / 16;
        thread.recent_launches += 16 * (launches + 1) - thread.recent_launches / 16;
        thread.interval_ns = thread.recent_ns * 16 / thread.recent_launches;
        thread.until_sample -= launches + 1;
        if (thread.interval_ns >= FAST_NS) { /* what was drawn when launches were faster would take too long */
            const int64_t longest =
                2 * SAMPLE_EVERY_NS > thread.interval_ns ? (int64_t)(2 * SAMPLE_EVERY_NS / thread.interval_ns) : 1;
            thread.until_sample = thread.until_sample < longest ? thread.until_sample : longest;
        }
        vgpu_crowd_note(vgpu_prepaid.sources | vgpu_crowd_member(stream, &vgpu_prepaid), launches + 1, now);
    } else {
        uint64_t random = thread.random;
        __builtin_memset(&thread, 0, sizeof thread);
        __builtin_memset(&vgpu_prepaid, 0, sizeof vgpu_prepaid);
        thread.random = random ? random : (uint64_t)(uintptr_t)&thread ^ now ^ key;
        vgpu_prepaid.epoch = current;
        thread.card = card;
        thread.interval_ns = SAMPLE_EVERY_NS;
        thread.until_sample = (int64_t)(vgpu_random(&thread.random) % FIRST_DISTANCE);
        announce_end();
        if (!atomic_load_explicit(&vgpu_one_card, memory_order_relaxed))
            ask_for_cards();
        vgpu_crowd_note(vgpu_crowd_member(stream, &vgpu_prepaid), 1, now);
    }
    if (thread.card != card || now - thread.looked_ns > BATCH_IDLE_NS)
        thread.batch_ns = 0;
    if (thread.card != card)
        vgpu_prepaid.left_ns = 0;
    thread.card = card;
    vgpu_prepaid.selector = limits_selector();
    vgpu_prepaid.sources = 0;
    thread.looked_ns = now;
}

/* GPU time of a launch. As long as little is known: at least as long as others of its key, or others of which nothing
 * is known, have been under way, so that a flood slows itself down; a settled estimate is doubted only where they have
 * been for longer than paid launches can be queued. */
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

static int64_t draw_distance(bool settled) {
    uint64_t mean = thread.interval_ns ? SAMPLE_EVERY_NS / thread.interval_ns : FEWEST_SAMPLES;
    mean = mean < FEWEST_SAMPLES && !(settled && thread.interval_ns < FAST_NS) ? mean : FEWEST_SAMPLES;
    return mean <= 1 ? 0 : (int64_t)(vgpu_random(&thread.random) % (2 * mean - 1));
}

/* Whether, and as what, this launch is measured. */
static bool chosen(struct vgpu_cost *cost, unsigned card, uint64_t reserved_ns, bool first_of_two,
                   enum vgpu_sample_kind *kind) {
    *kind = VGPU_SAMPLE_SETTLES;
    /* few may be of what it is not usually */
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
    if (thread.until_sample > 0)
        return false;
    if (first_of_two)
        return false;
    thread.until_sample = draw_distance(settled);
    thread.coupled = false;
    if (!vgpu_crowded())
        return true;
    vgpu_series_begin();
    *kind = VGPU_SAMPLE_COVERS;
    return true;
}

/* Pays for a launch of `cost_ns`, if it is short also for some that follow, and for the second of a couple. */
static void pay(const struct vgpu_place *place, const struct vgpu_pace *share, uint64_t cost_ns, bool is_short,
                bool couple, uint64_t now) {
    uint64_t amount = couple ? 2 * cost_ns : cost_ns;
    if (vgpu_prepaid.left_ns >= cost_ns)
        return;
    if (is_short) {
        const uint64_t batch = thread.batch_ns * 2 < BATCH_NS ? thread.batch_ns * 2 : BATCH_NS;
        thread.batch_ns = batch > cost_ns ? batch : cost_ns;
        amount = thread.batch_ns;
    }
    struct vgpu_turn turn = vgpu_turn_reserve(place->card, amount, share, now);
    vgpu_inspect_paid(place->card, amount, turn.start > now ? turn.start : now);
    if (couple)
        turn.start += vgpu_gcra_price(cost_ns, share->percent);
    if (turn.start > now + CARRY_NS)
        vgpu_turn_await(turn, place);
    vgpu_prepaid.left_ns += amount;
}

/* Pays the same on further cards, on which it will run as long: nothing of ours can be recorded there. */
static void pay_others(const struct vgpu_limits *limits, const struct vgpu_launch *launch) {
    for (uint32_t others = launch->others; others; others &= others - 1) {
        const struct vgpu_place place = {.card = (unsigned)__builtin_ctz(others), .device = VGPU_NO_DEVICE};
        const uint64_t now = vgpu_now_ns();
        const struct vgpu_pace share = vgpu_pace_now(limits, &place, now);
        vgpu_settle_refunds(place.card, share.percent);
        if (!share.percent) {
            vgpu_pacer_wants(place.card, now, launch->reserved_ns);
            continue;
        }
        const struct vgpu_turn turn = vgpu_turn_reserve(place.card, launch->reserved_ns, &share, now);
        if (turn.start > now + CARRY_NS)
            vgpu_turn_await(turn, &place);
    }
}

/* False: it should be measured, and there is no memory for that. */
static bool measure(struct vgpu_launch *launch, struct vgpu_cost *cost, bool first_of_two, bool first,
                    CUcontext context, CUstream stream) {
    static atomic_bool announced;
    enum vgpu_sample_kind kind;
    if (!chosen(cost, launch->card, launch->reserved_ns, first_of_two, &kind))
        return true;
    struct vgpu_sample *sample = vgpu_sample_begin(context, stream, kind != VGPU_SAMPLE_LEARNS || vgpu_crowd_watches());
    if (!sample)
        return kind != VGPU_SAMPLE_SETTLES;
    vgpu_cost_flies(cost, sample->recorded_ns);
    sample->cost = cost;
    sample->kind = kind;
    sample->meaning = atomic_load_explicit(&cost->meaning, memory_order_relaxed);
    sample->reserved_ns = launch->reserved_ns;
    sample->apart_ns = thread.interval_ns;
    sample->limit = launch->limit;
    sample->card = launch->card;
    sample->others = launch->others;
    sample->spent_ns = vgpu_contention_spent(launch->card);
    sample->first = first;
    sample->unknown = !vgpu_cost_sure(cost);
    if (sample->unknown) {
        vgpu_owed_begin(launch->card, sample->launched_ns);
        if (!atomic_exchange(&announced, true))
            atexit(settle_at_exit);
    }
    launch->sample = sample;
    return true;
}

/* How many launches the thread may make until it looks up again; a sample that is due before ends them. */
static uint32_t launches_ahead(void) {
    const uint64_t fast = LOOK_EVERY_NS / (thread.interval_ns + 1);
    const int64_t most = fast <= BATCH_LAUNCHES ? BATCH_LAUNCHES : fast < MOST_LAUNCHES ? (int64_t)fast : MOST_LAUNCHES;
    return thread.until_sample > most ? (uint32_t)most : thread.until_sample > 0 ? (uint32_t)thread.until_sample : 0;
}

/* A launch that has to look up: the thread has paid nothing in advance, or it is time to. False: there is no memory to
 * measure it. */
static __attribute__((noinline)) bool paid(struct vgpu_launch *launch, uint64_t key, CUstream stream, uint32_t others) {
    struct vgpu_place place;
    const struct vgpu_limits *limits = vgpu_limits_now();
    const CUfunction function = launch->function;
    *launch = (struct vgpu_launch){.counted = false};
    if (!limits || !vgpu_place_of_stream(stream, &place) || place.card >= limits->card_count)
        return true;
    if (vgpu_capturing(stream)) { /* costs nothing: the launch of the graph will pay */
        vgpu_graph_cards_captured(stream, place.card);
        return true;
    }
    const int kept = errno;
    uint64_t now = vgpu_now_ns();
    look_up(place.card, key, stream, now);
    struct vgpu_cost *cost = vgpu_cost_of(key);
    const bool settled = atomic_load_explicit(&cost->samples, memory_order_relaxed) >= VGPU_COST_SETTLED;
    const int results = atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed);
    if (results &&
        now - thread.collected_ns >
            (settled && results <= FEW && thread.interval_ns < FAST_NS ? COLLECT_RARELY_NS : COLLECT_EVERY_NS)) {
        thread.collected_ns = now;
        vgpu_samples_collect(vgpu_settle_sample, false);
    }
    vgpu_contention_update(place.card, now);
    vgpu_reap(REAP_EVERY_MS); /* those that ended with work under way have not paid for it */
    const struct vgpu_pace share = vgpu_pace_now(limits, &place, now);
    vgpu_settle_refunds(place.card, share.percent);
    const uint64_t missed = vgpu_contention_missed(place.card);
    if (missed && share.percent)
        vgpu_settle_missed(place.card, share.percent, (int64_t)missed);
    const int64_t hidden = vgpu_inspect_turn(place.card, now);
    if (hidden)
        vgpu_settle_missed(place.card, share.percent, hidden);
    launch->counted = true;
    launch->card = place.card;
    launch->others = others & ~(1u << place.card) & ((1u << limits->card_count) - 1);
    launch->limit = share.percent;

    bool first = false;
    if (!vgpu_cost_known(cost) && !atomic_load_explicit(&cost->flying, memory_order_relaxed))
        vgpu_code_load(function, place.context);
    if (share.percent && atomic_load_explicit(&cost->samples, memory_order_relaxed) <= 1) {
        vgpu_first_sample_await(cost);
        first = !vgpu_cost_sure(cost) && vgpu_unknown_await(place.card);
        now = vgpu_now_ns();
    }
    if (share.percent)
        launch->reserved_ns = expected(cost, settled, place.card, now);
    else
        launch->reserved_ns = vgpu_cost_known(cost) ? atomic_load_explicit(&cost->mean_ns, memory_order_relaxed) : 0;
    const bool inspected = vgpu_inspecting(place.card);
    const bool is_short = settled && !inspected && launch->reserved_ns <= BATCH_NS / 2 && !launch->others;
    /* Where others use the card, only a launch right behind another one of ours is sure to contain nothing of theirs.
     */
    const bool second = thread.coupled;
    const bool couple = !second && settled && !is_short && !inspected && launch->reserved_ns < VGPU_LONG_RUN_NS &&
                        thread.until_sample <= 0 && !vgpu_crowded() &&
                        vgpu_contention_company(place.card) == VGPU_SHARING;
    thread.coupled |= couple;
    if (thread.unpaced && share.percent)
        vgpu_prepaid.left_ns = 0;
    thread.unpaced = !share.percent;
    if (share.percent) {
        pay(&place, &share, launch->reserved_ns, is_short, couple, now);
    } else {
        /* the arbiter may begin to pace, and changes nothing that a launch looks at */
        vgpu_prepaid.left_ns = share.moves ? BATCH_NS : COUNTED_NS;
        vgpu_pacer_wants(place.card, now, launch->reserved_ns);
    }
    if (launch->others)
        pay_others(limits, launch);
    const bool measured = measure(launch, cost, thread.coupled && !second, first, place.context, stream);
    if (first && !launch->sample)
        vgpu_unknown_end(place.card);
    if (share.percent && !launch->sample) {
        vgpu_inspect_unmeasured(place.card);
        vgpu_owed_mark(&place, stream, now);
    }

    vgpu_prepaid.left_ns = vgpu_prepaid.left_ns > launch->reserved_ns ? vgpu_prepaid.left_ns - launch->reserved_ns : 0;
    thread.filled_ns = vgpu_prepaid.left_ns;
    thread.filled = vgpu_prepaid.left = launches_ahead();
    __typeof__(vgpu_prepaid.known[0]) *known = &vgpu_prepaid.known[vgpu_prepaid_place(key)];
    if (is_short) {
        known->key = key;
        known->cost = cost;
    } else if (known->key == key) {
        known->key = 0; /* it has grown long */
    }
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
            turn_window(pacer, thread.looked_ns);
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
        vgpu_inspect_wait(wait, thread.card, vgpu_now_ns());
}

void vgpu_pacer_waited_for(const struct vgpu_wait *wait) {
    vgpu_pacer_waited();
    if (!wait->begun_ns)
        return;
    const int kept = errno;
    vgpu_owed_look();
    const uint32_t percent = atomic_load_explicit(&vgpu_pacer_shared(thread.card)->percent, memory_order_relaxed);
    const uint64_t unexplained =
        atomic_load(&vgpu_samples_outstanding) ? 0 : vgpu_inspect_waited(wait, thread.card, vgpu_now_ns());
    if (unexplained) {
        atomic_fetch_add(&vgpu_prepaid_epoch, 1);
        vgpu_settle_missed(thread.card, percent, (int64_t)unexplained);
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
    if (start && now - start > WINDOW_NS) { /* nobody launched since: what the window has until now */
        int64_t used = (int64_t)(atomic_load(&pacer->gpu_ns) - atomic_load(&pacer->window_gpu_ns));
        permille = used > 0 ? (uint64_t)used * 1000 / (now - start) : 0;
    }
    return permille >= 1000 ? 100 : (unsigned)((permille + 5) / 10);
}
