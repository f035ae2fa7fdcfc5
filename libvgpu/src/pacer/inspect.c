/* Inspects processes whose launches may be unlike their mean. */
#include "pacer/inspect.h"

#include "base/spin.h"
#include "pacer/contention.h"
#include "pacer/costs.h"

#define UNLIKE 4u               /* unlike: this many times the mean */
#define LEAST_UNLIKE_NS 100000u /* shorter launches are measured often enough */
#define UNEXPLAINED_NS 500000u  /* part of a wait that no charge explains */
#define LEAST_LAUNCHES 16u      /* an inspection does not end before it has measured this many launches */
#define SECOND_NS 1000000000u
#define FIRST_LENGTH_NS SECOND_NS
#define LONGEST_AFTER_FIND_NS (256ull * SECOND_NS)
#define LONGEST_AFTER_NONE_NS (64ull * SECOND_NS)
#define FIRST_QUIET_NS (10ull * SECOND_NS)
#define LONGEST_QUIET_NS (320ull * SECOND_NS)
#define FORGET_NS (600ull * SECOND_NS) /* after so long without an inspection, the next one counts as the first */
#define HARMLESS 4u                    /* waits up to this many times the longest harmless wait are harmless */
#define NOISE 20                       /* a difference below 1/NOISE of the usual time is no find */
#define NOISE_NS 1000000               /* a smaller difference, in ns, is no find either */

_Atomic uint64_t vgpu_inspected_until[VGPU_MAX_CARDS];

/* No new inspection before `until`, because the last reason turned out to be none. Each time `length` grows. */
struct quiet {
    uint64_t until, length;
};

static struct inspection {
    _Atomic uint64_t since;            /* CLOCK_MONOTONIC ns: when unmeasured work began; 0: no launch yet */
    uint64_t since_spent, begun_spent; /* GPU time charged at `since`, and at the beginning of the inspection */
    uint64_t unseen;                   /* charged for unmeasured work */
    uint64_t room;                     /* how much more work can have run in that time */
    uint64_t deposit, longest;         /* charged for waits, and the longest such wait */
    uint64_t harmless;                 /* waits up to this length are harmless */
    uint64_t length, ended;
    bool by_wait;
    struct quiet waits, samples;
    _Atomic int64_t excess;
    _Atomic uint32_t seen, unlike;
} inspections[VGPU_MAX_CARDS];

static _Atomic uint64_t due[VGPU_MAX_CARDS];   /* CLOCK_MONOTONIC ns: until then, paid work may still run */
static atomic_bool unmeasured[VGPU_MAX_CARDS]; /* some launches have paid a mean */
static vgpu_spin lock;                         /* of the inspections */

void vgpu_inspect_forget(void) {
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        atomic_store(&vgpu_inspected_until[card], 0);
        atomic_store(&due[card], 0);
        atomic_store(&unmeasured[card], false);
        inspections[card] = (struct inspection){0};
    }
    atomic_store(&lock, 0);
}

static void lengthen(struct quiet *quiet, uint64_t now) {
    quiet->length =
        quiet->length ? quiet->length * 2 < LONGEST_QUIET_NS ? quiet->length * 2 : LONGEST_QUIET_NS : FIRST_QUIET_NS;
    quiet->until = now + quiet->length;
}

/* With the lock held. */
static void begin(unsigned card, uint64_t now, bool by_wait) {
    struct inspection *this = &inspections[card];
    if (!this->length || now - this->ended > FORGET_NS)
        this->length = FIRST_LENGTH_NS;
    const uint64_t spent = vgpu_contention_spent(card), wall = now - this->since;
    this->begun_spent = spent;
    this->unseen = spent > this->since_spent ? spent - this->since_spent : 0;
    this->room = wall > this->unseen ? wall - this->unseen : 0;
    this->deposit = this->longest = 0;
    this->by_wait = by_wait;
    atomic_store(&this->excess, 0);
    atomic_store(&this->seen, 0);
    atomic_store(&this->unlike, 0);
    atomic_store(&vgpu_inspected_until[card], now + this->length);
}

/* The launches took more than their means. So the unmeasured work is taken to have been longer in the same proportion,
 * as far as there was time for it. */
static int64_t find(struct inspection *this, int64_t excess, int64_t usual) {
    const double part = usual > 0 ? (double)excess / (double)usual : 1e9;
    const double more = (double)this->unseen * part, most = (double)this->room;
    const uint64_t owed = (uint64_t)(more < most ? more : most);
    this->length = this->length * 4 < LONGEST_AFTER_FIND_NS ? this->length * 4 : LONGEST_AFTER_FIND_NS;
    this->waits = this->samples = (struct quiet){0};
    this->harmless = 0;
    return owed > this->deposit ? (int64_t)(owed - this->deposit) : 0;
}

static int64_t none(struct inspection *this, uint64_t now) {
    if (this->by_wait) {
        const uint64_t harmless = this->longest * HARMLESS;
        this->harmless = harmless > this->harmless ? harmless : this->harmless;
        lengthen(&this->waits, now);
    } else if (atomic_load(&this->unlike)) {
        lengthen(&this->samples, now); /* launches of that kind differ, and their mean is right */
    } else {
        this->length = this->length * 2 < LONGEST_AFTER_NONE_NS ? this->length * 2 : LONGEST_AFTER_NONE_NS;
    }
    return -(int64_t)this->deposit;
}

int64_t vgpu_inspect_turn(unsigned card, uint64_t now) {
    struct inspection *this = &inspections[card];
    const uint64_t until = atomic_load_explicit(&vgpu_inspected_until[card], memory_order_relaxed);
    if (!atomic_load_explicit(&this->since, memory_order_relaxed) && vgpu_spin_try(&lock)) {
        this->since = now;
        this->since_spent = vgpu_contention_spent(card);
        vgpu_spin_unlock(&lock);
    }
    if (!until || now < until || atomic_load_explicit(&this->seen, memory_order_relaxed) < LEAST_LAUNCHES ||
        !vgpu_spin_try(&lock))
        return 0;
    const int64_t excess = atomic_load(&this->excess),
                  charged = (int64_t)(vgpu_contention_spent(card) - this->begun_spent);
    int64_t result = 0;
    if (atomic_load(&vgpu_inspected_until[card]) == until) {
        const bool more = excess > NOISE_NS && excess > charged / NOISE;
        result = more ? find(this, excess, charged - excess) : none(this, now);
        if (more)
            vgpu_cost_doubt(0);
        this->ended = now;
        atomic_store(&this->since, now);
        this->since_spent = vgpu_contention_spent(card) + (uint64_t)result;
        atomic_store(&vgpu_inspected_until[card], 0);
    }
    vgpu_spin_unlock(&lock);
    return result;
}

static bool is_unlike(uint64_t gpu_ns, uint64_t mean_ns) {
    return gpu_ns >= LEAST_UNLIKE_NS && gpu_ns / UNLIKE >= mean_ns;
}

bool vgpu_inspect_sample(unsigned card, uint64_t gpu_ns, uint64_t mean_ns, uint64_t now) {
    struct inspection *this = &inspections[card];
    if (!is_unlike(gpu_ns, mean_ns) || vgpu_contention_company(card) == VGPU_SHARING || vgpu_inspecting(card) ||
        !vgpu_spin_try(&lock))
        return false;
    const bool begins = !vgpu_inspecting(card) && now >= this->samples.until;
    if (begins)
        begin(card, now, false);
    vgpu_spin_unlock(&lock);
    return begins;
}

void vgpu_inspect_found(unsigned card, uint64_t gpu_ns, uint64_t mean_ns) {
    struct inspection *this = &inspections[card];
    atomic_fetch_add(&this->excess, (int64_t)(gpu_ns - mean_ns));
    atomic_fetch_add(&this->seen, 1);
    if (is_unlike(gpu_ns, mean_ns))
        atomic_fetch_add(&this->unlike, 1);
}

void vgpu_inspect_paid(unsigned card, uint64_t gpu_ns, uint64_t now) {
    uint64_t seen = atomic_load_explicit(&due[card], memory_order_relaxed), next;
    do {
        next = (seen > now ? seen : now) + gpu_ns;
    } while (
        !atomic_compare_exchange_weak_explicit(&due[card], &seen, next, memory_order_relaxed, memory_order_relaxed));
}

void vgpu_inspect_unmeasured(unsigned card) {
    if (!atomic_load_explicit(&unmeasured[card], memory_order_relaxed))
        atomic_store_explicit(&unmeasured[card], true, memory_order_relaxed);
}

void vgpu_inspect_wait(struct vgpu_wait *wait, unsigned card, uint64_t now) {
    const uint64_t until = atomic_load_explicit(&due[card], memory_order_relaxed);
    wait->begun_ns = atomic_load_explicit(&unmeasured[card], memory_order_relaxed) ? now : 0;
    wait->explained_ns = vgpu_contention_spent(card) - (until > now ? until - now : 0);
}

uint64_t vgpu_inspect_waited(const struct vgpu_wait *wait, unsigned card, uint64_t now) {
    struct inspection *this = &inspections[card];
    const uint64_t wall = now - wait->begun_ns;
    if (!wait->begun_ns || wall < UNEXPLAINED_NS || vgpu_inspecting(card) ||
        vgpu_contention_company(card) == VGPU_SHARING)
        return 0;
    const int64_t rest = (int64_t)wall - (int64_t)(vgpu_contention_spent(card) - wait->explained_ns);
    if (rest < (int64_t)UNEXPLAINED_NS || (uint64_t)rest < wall / UNLIKE || !vgpu_spin_try(&lock))
        return 0;
    const bool begins = !vgpu_inspecting(card) && (now >= this->waits.until || (uint64_t)rest > this->harmless);
    if (begins) {
        begin(card, now, true);
        this->deposit = this->longest = (uint64_t)rest;
    }
    vgpu_spin_unlock(&lock);
    return begins ? (uint64_t)rest : 0;
}
