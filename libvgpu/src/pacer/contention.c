/* Detects other work on the card, by the process's own figures and by NVML. */
#define _GNU_SOURCE
#include "pacer/contention.h"

#include "base/clock.h"
#include "base/spin.h"
#include "ledger/ledger.h"
#include "pacer/core_share.h"
#include "pacer/crosscheck.h"

#define LOOK_NS 250000000u
#define LOOKS 4u              /* NVML averages over up to a second: compare it with this process's last second */
#define LINGER_NS 2000000000u /* for so long, samples that may contain a neighbour stay suspect */
#define TOLERANCE_PERCENT 6
#define LEAST_PERCENT 5 /* NVML counts in whole percents: smaller figures say nothing */
#define NOISE_PERCENT 2 /* smaller differences do not count */
#define SURE_LOOKS 8u   /* after this many checks without a neighbour, the process counts as alone */
/* a correction takes about this many checks: NVML is late, and the estimates follow even later */
#define CAUTION 32
#define WHOLE 1024
#define SURE_MISSED_NS 500000000 /* beyond TOLERANCE_PERCENT of the time */
#define MOST_AHEAD_NS 1000000000 /* a process that was charged too much may use that much later without a charge */

static struct look {
    uint64_t at, container_ns, process_ns;
} looks[VGPU_MAX_CARDS][LOOKS];

static struct {
    _Atomic uint64_t next_look;
    _Atomic uint64_t until; /* contended until then */
    _Atomic int64_t own_ns;
    _Atomic uint64_t missed_ns;
    int64_t deficit_ns;     /* under the lock: used by NVML's figures, minus charged */
    _Atomic uint32_t scale; /* factor for measured times, in 1/WHOLE; 0: no check yet */
    _Atomic uint32_t count; /* checks so far */
} cards[VGPU_MAX_CARDS];

static vgpu_spin lock;

void vgpu_contention_own(unsigned card, int64_t gpu_ns) {
    atomic_fetch_add_explicit(&cards[card].own_ns, gpu_ns, memory_order_relaxed);
}

uint64_t vgpu_contention_spent(unsigned card) {
    return (uint64_t)atomic_load_explicit(&cards[card].own_ns, memory_order_relaxed);
}

/* Used with neighbours and without an arbiter, which would know better. Moves the charges slowly towards the use that
 * NVML saw. */
static void correct(unsigned card, int64_t charged, int64_t used) {
    if (charged < LEAST_PERCENT || used < LEAST_PERCENT ||
        (charged - used <= NOISE_PERCENT && used - charged <= NOISE_PERCENT))
        return;
    int64_t scale = atomic_load_explicit(&cards[card].scale, memory_order_relaxed);
    scale = scale ? scale : WHOLE;
    scale += (scale * used / charged - scale) / CAUTION;
    scale = scale < WHOLE / 4 ? WHOLE / 4 : scale > WHOLE * 4 ? WHOLE * 4 : scale;
    atomic_store_explicit(&cards[card].scale, (uint32_t)scale, memory_order_relaxed);
}

/* Counts the use since the last check: `mine` percent, by NVML. A missed amount that will be charged counts as
 * charged. */
static void note_missed(unsigned card, const struct look *last, struct look *this, unsigned mine) {
    const int64_t passed = (int64_t)(this->at - last->at), charged = (int64_t)(this->process_ns - last->process_ns);
    int64_t deficit = cards[card].deficit_ns + passed * ((int64_t)mine - TOLERANCE_PERCENT) / 100 - charged;
    if (deficit > SURE_MISSED_NS) {
        atomic_fetch_add(&cards[card].missed_ns, (uint64_t)deficit);
        this->process_ns += (uint64_t)deficit;
        deficit = 0;
    }
    cards[card].deficit_ns = deficit > -MOST_AHEAD_NS ? deficit : -MOST_AHEAD_NS;
}

uint64_t vgpu_contention_missed(unsigned card) {
    return atomic_load_explicit(&cards[card].missed_ns, memory_order_relaxed)
               ? atomic_exchange(&cards[card].missed_ns, 0)
               : 0;
}

static bool told_of_neighbours(unsigned card) {
    return atomic_load_explicit(&vgpu_mapping()->limits->arbiter[card].neighbours, memory_order_relaxed) > 0;
}

/* With the lock held. True if this check finds another user of the card. */
static bool shared_now(unsigned card, uint64_t now) {
    const uint32_t count = atomic_fetch_add_explicit(&cards[card].count, 1, memory_order_relaxed);
    const struct look last = looks[card][(count + LOOKS - 1) % LOOKS], oldest = looks[card][count % LOOKS];
    const struct look this = {now, atomic_load(&vgpu_mapping()->usage->pacer[card].gpu_ns),
                              (uint64_t)atomic_load(&cards[card].own_ns)};
    looks[card][count % LOOKS] = this;
    const int64_t siblings =
        (int64_t)(this.container_ns - last.container_ns) - (int64_t)(this.process_ns - last.process_ns);
    const bool has_siblings = last.at && now > last.at && siblings * 100 / (int64_t)(now - last.at) > TOLERANCE_PERCENT;
    if (vgpu_arbiter_lives(card, now)) { /* the arbiter knows neighbours before this process has checked twice */
        atomic_store_explicit(&cards[card].scale, WHOLE, memory_order_relaxed);
        return has_siblings || told_of_neighbours(card);
    }
    struct vgpu_seen seen;
    if (!oldest.at)
        return has_siblings;
    const int64_t charged = (int64_t)(this.container_ns - oldest.container_ns) * 100 / (int64_t)(now - oldest.at);
    /* without NVML's figures by process, use beyond the container's own belongs to others, and measured times are
     * charged in full */
    if (!vgpu_crosscheck(card, &seen))
        return has_siblings || (int64_t)seen.all > charged + TOLERANCE_PERCENT;
    note_missed(card, &last, &looks[card][count % LOOKS], seen.mine);
    if (seen.others > TOLERANCE_PERCENT)
        correct(card, charged, seen.ours);
    else
        atomic_store_explicit(&cards[card].scale, WHOLE, memory_order_relaxed);
    return seen.others > TOLERANCE_PERCENT || has_siblings;
}

void vgpu_contention_update(unsigned card, uint64_t now) {
    uint64_t due = atomic_load_explicit(&cards[card].next_look, memory_order_relaxed);
    if (now < due || !vgpu_spin_try(&lock))
        return;
    atomic_store_explicit(&cards[card].next_look, now + LOOK_NS, memory_order_relaxed);
    if (shared_now(card, now))
        atomic_store_explicit(&cards[card].until, now + LINGER_NS, memory_order_relaxed);
    else if (now >= atomic_load_explicit(&cards[card].until, memory_order_relaxed))
        atomic_store_explicit(&cards[card].until, 0, memory_order_relaxed);
    vgpu_spin_unlock(&lock);
}

uint64_t vgpu_contention_scaled(unsigned card, uint64_t gpu_ns) {
    uint32_t scale = atomic_load_explicit(&cards[card].scale, memory_order_relaxed);
    return scale == 0 || scale == WHOLE ? gpu_ns : gpu_ns * scale / WHOLE;
}

enum vgpu_company vgpu_contention_company(unsigned card) {
    if (atomic_load_explicit(&cards[card].until, memory_order_relaxed))
        return VGPU_SHARING;
    if (told_of_neighbours(card)) { /* a neighbour has come since the last check */
        const uint64_t now = vgpu_now_ns();
        if (vgpu_arbiter_lives(card, now)) {
            atomic_store_explicit(&cards[card].until, now + LINGER_NS, memory_order_relaxed);
            return VGPU_SHARING;
        }
    }
    return atomic_load_explicit(&cards[card].count, memory_order_relaxed) > SURE_LOOKS ? VGPU_ALONE : VGPU_UNSURE;
}
