#define _GNU_SOURCE
#include "pacer.h"

#include <errno.h>
#include <time.h>

#include "capture.h"
#include "charge.h"
#include "contention.h"
#include "gcra.h"
#include "samples.h"

#define BURST_NS 50000000u         /* credit that idle time earns; also covers late wake-ups and waiting behind a long kernel of others */
#define CARRY_NS 60000u            /* shorter waits are carried over to the next launch: a sleep overshoots by about that much */
#define POLL_NS 1000000u           /* while results are outstanding, a sleeping launch looks for credit this often */
#define FIRST_GUESS_NS 50000u      /* price of a launch of which nothing is known */
#define FIRST_WAIT_NS 100000000u   /* longest wait for the first measurement of a key; once per key */
#define SAMPLE_EVERY_NS 1000000u   /* one measurement per thread and this time, on average */
#define FREE_SAMPLING 128u         /* without a limit: one launch of so many is measured */
#define BATCH_NS 50000u            /* GPU time that a thread keeps to itself before it is counted for all to see */
#define BATCH_LAUNCHES 64u
#define HEARTBEAT_NS 1000000000u   /* an arbiter that is silent for longer is gone */
#define WINDOW_NS 500000000u
#define SPOILT_SHARE 8u            /* a short sample is void if the host was away for more than 1/8 of it */

static __thread __attribute__((tls_model("initial-exec"))) struct {
    uint64_t random;
    uint64_t last_launch_ns;
    uint64_t interval_ns;          /* mean time between launches */
    unsigned card;
    uint64_t gpu_ns;
    uint64_t launches;
} thread;

/* Credit and debit that samples of this process brought, per card: a launch that sleeps sees what became of it since. Only refunds are added. */
static _Atomic uint64_t refunds[VGPU_MAX_CARDS];

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct vgpu_pacer_card *shared(unsigned card) {
    return &vgpu_mapping()->usage->pacer[card];
}

/* For the arbiter: this container has, or will have, work at `when`. */
static void want(struct vgpu_pacer_card *pacer, uint64_t when) {
    uint64_t seen = atomic_load_explicit(&pacer->wanted_until, memory_order_relaxed);
    while (seen < when && !atomic_compare_exchange_weak_explicit(&pacer->wanted_until, &seen, when, memory_order_relaxed, memory_order_relaxed))
        ;
}

/* Closes the utilisation window when it is old enough; one of the racing processes does it. */
static void turn_window(struct vgpu_pacer_card *pacer, uint64_t now) {
    uint64_t start = atomic_load_explicit(&pacer->window_start, memory_order_relaxed);
    if (now - start < WINDOW_NS || !atomic_compare_exchange_strong(&pacer->window_start, &start, now))
        return;
    uint64_t total = atomic_load(&pacer->gpu_ns);
    uint64_t used = total - atomic_exchange(&pacer->window_gpu_ns, total);
    atomic_store(&pacer->window_share, start ? used * 1000 / (now - start) : 0);
}

static void flush_counts(void) {
    if (thread.launches) {
        vgpu_count_gpu_time(thread.card, thread.gpu_ns, thread.launches);
        vgpu_contention_own(thread.card, (int64_t)thread.gpu_ns);
        uint64_t now = now_ns();
        want(shared(thread.card), now);
        turn_window(shared(thread.card), now);
    }
    thread.gpu_ns = 0;
    thread.launches = 0;
}

static void count(unsigned card, uint64_t gpu_ns) {
    if (thread.card != card)
        flush_counts();
    thread.card = card;
    thread.gpu_ns += gpu_ns;
    if (++thread.launches >= BATCH_LAUNCHES || thread.gpu_ns >= BATCH_NS)
        flush_counts();
}

/* The share in force for a card now, in percent; 0: none. */
static uint32_t share_of(const struct vgpu_limits *limits, unsigned card) {
    uint32_t cores = limits->cards[card].cores;
    if (limits->core_policy == VGPU_CORES_NONE)
        return 0;
    if (limits->core_policy == VGPU_CORES_ELASTIC) {
        const struct vgpu_limits_file *file = vgpu_mapping()->limits;
        uint64_t beat = atomic_load_explicit(&file->arbiter[card].heartbeat_ns, memory_order_relaxed);
        uint32_t granted = atomic_load_explicit(&file->arbiter[card].share, memory_order_relaxed);
        uint32_t ceiling = limits->cards[card].cores_ceiling;
        if (beat && granted && now_ns() - beat < HEARTBEAT_NS)
            cores = ceiling && granted > ceiling ? ceiling : granted;
        else if (!cores)
            cores = ceiling;
    }
    return cores >= 100 ? 0 : cores;
}

/* A finished measurement: the estimate learns, and a long launch pays what it took. */
static void collected(const struct vgpu_sample *sample, uint64_t gpu_ns) {
    bool known = vgpu_cost_known(sample->cost);
    uint64_t mean = atomic_load_explicit(&sample->cost->mean_ns, memory_order_relaxed);
    uint64_t away = sample->gap_ns < gpu_ns ? sample->gap_ns : gpu_ns / 2;
    if (away * SPOILT_SHARE > gpu_ns && known)
        return;
    gpu_ns -= away;
    bool undisturbed = vgpu_cost_learn(sample->cost, gpu_ns, vgpu_contended(sample->card));
    if (known && (!undisturbed || (mean < VGPU_LONG_RUN_NS && gpu_ns < VGPU_LONG_RUN_NS)))
        return;
    int64_t difference = (int64_t)gpu_ns - (int64_t)sample->reserved_ns;
    vgpu_count_gpu_time(sample->card, (uint64_t)difference, 0);
    vgpu_contention_own(sample->card, difference);
    if (!sample->limit)
        return;
    int64_t price = difference * 100 / (int64_t)sample->limit;
    vgpu_gcra_settle(&shared(sample->card)->tat, price);
    if (price < 0)
        atomic_fetch_add(&refunds[sample->card], (uint64_t)-price);
}

static void sleep_until(uint64_t when) {
    struct timespec at = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

/* Waits for the start that this launch has reserved. Refunds that come meanwhile bring it forward. */
static void wait_for(uint64_t start, unsigned card, CUcontext context, uint64_t refunded) {
    uint64_t begun = now_ns(), now = begun;
    while (true) {
        uint64_t earlier = atomic_load(&refunds[card]) - refunded;
        uint64_t target = start > earlier ? start - earlier : 0;
        if (target <= now + CARRY_NS)
            break;
        bool outstanding = vgpu_samples_collect(context, collected);
        sleep_until(outstanding && target - now > POLL_NS ? now + POLL_NS : target);
        now = now_ns();
    }
    if (now > begun)
        vgpu_count_throttled(card, now - begun);
}

/* The second launch of an unknown key waits for the first one's measurement, so that a flood of long kernels cannot start unpaid. Bounded, and once
 * per key: a kernel may be waiting for something that this very thread will do later. */
static void await_first_sample(struct vgpu_cost *cost, CUcontext context) {
    if (!atomic_load(&cost->flying) || atomic_exchange(&cost->waited, 1))
        return;
    uint64_t until = now_ns() + FIRST_WAIT_NS;
    while (!vgpu_cost_known(cost) && atomic_load(&cost->flying) && now_ns() < until && !vgpu_any_capture()) {
        if (vgpu_samples_collect(context, collected))
            sleep_until(now_ns() + CARRY_NS);
    }
}

/* Price of a launch in GPU time. Unknown: as long as its first launch has been under way, so that a flood slows itself down. */
static uint64_t guess(struct vgpu_cost *cost, uint64_t now) {
    if (vgpu_cost_known(cost))
        return atomic_load_explicit(&cost->mean_ns, memory_order_relaxed);
    uint64_t first = 0;
    if (atomic_compare_exchange_strong(&cost->first_ns, &first, now))
        return FIRST_GUESS_NS;
    return now - first > FIRST_GUESS_NS ? now - first : FIRST_GUESS_NS;
}

static bool wants_sample(struct vgpu_cost *cost, uint32_t limit) {
    if (!vgpu_cost_known(cost) || atomic_load_explicit(&cost->mean_ns, memory_order_relaxed) >= VGPU_LONG_RUN_NS)
        return true;
    if (!thread.random)
        thread.random = (uint64_t)(uintptr_t)&thread ^ now_ns();
    if (atomic_load_explicit(&cost->samples, memory_order_relaxed) < VGPU_COST_SETTLED)
        return vgpu_cost_chosen(&thread.random, 2);
    uint64_t every = limit && thread.interval_ns ? SAMPLE_EVERY_NS / thread.interval_ns : FREE_SAMPLING;
    return vgpu_cost_chosen(&thread.random, every < 1024 ? (uint32_t)every : 1024);
}

static void note_interval(uint64_t now) {
    uint64_t gap = now - thread.last_launch_ns;
    if (thread.last_launch_ns)
        thread.interval_ns += ((int64_t)gap - (int64_t)thread.interval_ns) / 16;
    thread.last_launch_ns = now;
}

bool vgpu_pacer_before(struct vgpu_launch *launch, uint64_t key, CUstream stream) {
    launch->counted = false;
    launch->sample = NULL;
    enum vgpu_mode mode = vgpu_enforcement();
    if (mode == VGPU_UNLIMITED)
        return true;
    if (mode == VGPU_BROKEN)
        return false;
    struct vgpu_place place;
    const struct vgpu_limits *limits = vgpu_limits_now();
    /* Captured work costs nothing: the launch of the graph will pay. */
    if (!limits || vgpu_capturing(stream) || !vgpu_place_now(&place) || place.card >= limits->card_count)
        return true;
    int kept = errno;
    *launch = (struct vgpu_launch){
        .counted = true, .card = place.card, .limit = share_of(limits, place.card), .stream = stream, .cost = vgpu_cost_of(key)};
    if (atomic_load_explicit(&vgpu_samples_outstanding, memory_order_relaxed))
        vgpu_samples_collect(place.context, collected);
    if (launch->limit) {
        uint64_t now = now_ns();
        note_interval(now);
        vgpu_contention_update(place.card, now);
        if (!vgpu_cost_known(launch->cost)) {
            await_first_sample(launch->cost, place.context);
            now = now_ns();
        }
        launch->reserved_ns = guess(launch->cost, now);
        uint64_t refunded = atomic_load(&refunds[place.card]);
        uint64_t price = vgpu_gcra_price(launch->reserved_ns, launch->limit);
        uint64_t start = vgpu_gcra_reserve(&shared(place.card)->tat, now, price, BURST_NS);
        want(shared(place.card), start > now ? start : now);
        if (start > now + CARRY_NS)
            wait_for(start, place.card, place.context, refunded);
    } else {
        launch->reserved_ns = vgpu_cost_known(launch->cost) ? atomic_load(&launch->cost->mean_ns) : 0;
    }
    if (wants_sample(launch->cost, launch->limit)) {
        if (!launch->limit)
            vgpu_contention_update(place.card, now_ns());
        launch->sample = vgpu_sample_begin(place.context, stream);
    }
    if (launch->sample) {
        atomic_fetch_add(&launch->cost->flying, 1);
        launch->sample->cost = launch->cost;
        launch->sample->reserved_ns = launch->reserved_ns;
        launch->sample->limit = launch->limit;
        launch->sample->card = launch->card;
    }
    errno = kept;
    return true;
}

CUresult vgpu_pacer_after(struct vgpu_launch *launch, CUresult result) {
    if (!launch->counted)
        return result;
    int kept = errno;
    if (launch->sample)
        vgpu_sample_end(launch->sample, launch->stream, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        count(launch->card, launch->reserved_ns);
    else if (launch->limit)
        vgpu_gcra_settle(&shared(launch->card)->tat, -(int64_t)vgpu_gcra_price(launch->reserved_ns, launch->limit));
    errno = kept;
    return result;
}

void vgpu_pacer_context_going(CUcontext context) {
    vgpu_own_tables();
    if (context)
        vgpu_samples_drop(context);
}

unsigned vgpu_pacer_utilization(unsigned card) {
    struct vgpu_pacer_card *pacer = shared(card);
    uint64_t now = now_ns(), start = atomic_load(&pacer->window_start), permille = atomic_load(&pacer->window_share);
    if (start && now - start > WINDOW_NS) /* nobody launched since: what the window has until now */
        permille = (atomic_load(&pacer->gpu_ns) - atomic_load(&pacer->window_gpu_ns)) * 1000 / (now - start);
    return permille >= 1000 ? 100 : (unsigned)((permille + 5) / 10);
}
