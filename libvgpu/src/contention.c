#define _GNU_SOURCE
#include "contention.h"

#include "crosscheck.h"
#include "ledger.h"
#include "share.h"
#include "spin.h"

#define LOOK_NS 250000000u
#define LOOKS 4u                 /* NVML averages over up to a second: compare with our own last second */
#define LINGER_NS 2000000000u    /* the samples that remember a neighbour stay suspect for so long */
#define TOLERANCE_PERCENT 6
#define LEAST_PERCENT 5          /* NVML counts in whole percents: smaller figures say nothing */
#define CAUTION 8                /* a correction takes about so many looks */
#define WHOLE 1024

static struct look {
    uint64_t at, container_ns, process_ns;
} looks[VGPU_MAX_CARDS][LOOKS];

static struct {
    _Atomic uint64_t next_look;
    _Atomic uint64_t until; /* contended until then */
    _Atomic uint64_t neighboured_until;
    _Atomic int64_t own_ns;
    _Atomic uint32_t scale; /* of measured times, in 1/WHOLE; 0: not yet looked */
    uint32_t count;         /* looks so far; only whoever holds `lock` */
} cards[VGPU_MAX_CARDS];

static vgpu_spin lock;

void vgpu_contention_own(unsigned card, int64_t gpu_ns) {
    atomic_fetch_add_explicit(&cards[card].own_ns, gpu_ns, memory_order_relaxed);
}

enum company { ALONE, SIBLINGS, NEIGHBOURS };

/* Beside neighbours, and without an arbiter that knows better: what we charge is slowly brought to what NVML saw us use. */
static void correct(unsigned card, unsigned charged, unsigned used) {
    if (charged < LEAST_PERCENT || used < LEAST_PERCENT)
        return;
    int64_t scale = atomic_load_explicit(&cards[card].scale, memory_order_relaxed);
    scale += (scale * (int64_t)used / (int64_t)charged - scale) / CAUTION;
    scale = scale < WHOLE / 4 ? WHOLE / 4 : scale > WHOLE * 4 ? WHOLE * 4 : scale;
    atomic_store_explicit(&cards[card].scale, (uint32_t)scale, memory_order_relaxed);
}

/* With the lock held: whom this look finds on the card. */
static enum company company_now(unsigned card, uint64_t now) {
    struct look *oldest = &looks[card][cards[card].count++ % LOOKS];
    struct look before = *oldest;
    uint64_t own = (uint64_t)atomic_load(&cards[card].own_ns);
    *oldest = (struct look){now, atomic_load(&vgpu_mapping()->usage->pacer[card].gpu_ns), own};
    if (!before.at || now <= before.at)
        return ALONE;
    int64_t span = (int64_t)(now - before.at);
    int64_t container = (int64_t)(oldest->container_ns - before.container_ns) * 100 / span;
    int64_t process = (int64_t)(own - before.process_ns) * 100 / span;
    enum company company = container - process > TOLERANCE_PERCENT ? SIBLINGS : ALONE;
    if (vgpu_arbiter_lives(card, now)) {
        atomic_store_explicit(&cards[card].scale, WHOLE, memory_order_relaxed);
        return atomic_load_explicit(&vgpu_mapping()->limits->arbiter[card].neighbours, memory_order_relaxed) ? NEIGHBOURS : company;
    }
    unsigned ours, others;
    if (!vgpu_crosscheck(card, &ours, &others))
        return company;
    if (others <= TOLERANCE_PERCENT) {
        atomic_store_explicit(&cards[card].scale, WHOLE, memory_order_relaxed);
        return company;
    }
    correct(card, (unsigned)(container > 0 ? container : 0), ours);
    return NEIGHBOURS;
}

static void linger(_Atomic uint64_t *until, bool found, uint64_t now) {
    if (found)
        atomic_store_explicit(until, now + LINGER_NS, memory_order_relaxed);
    else if (now >= atomic_load_explicit(until, memory_order_relaxed))
        atomic_store_explicit(until, 0, memory_order_relaxed);
}

void vgpu_contention_update(unsigned card, uint64_t now) {
    uint64_t due = atomic_load_explicit(&cards[card].next_look, memory_order_relaxed);
    if (now < due || !vgpu_spin_try(&lock))
        return;
    atomic_store_explicit(&cards[card].next_look, now + LOOK_NS, memory_order_relaxed);
    enum company company = company_now(card, now);
    linger(&cards[card].until, company != ALONE, now);
    linger(&cards[card].neighboured_until, company == NEIGHBOURS, now);
    vgpu_spin_unlock(&lock);
}

uint64_t vgpu_contention_scaled(unsigned card, uint64_t gpu_ns) {
    uint32_t scale = atomic_load_explicit(&cards[card].scale, memory_order_relaxed);
    return scale == 0 || scale == WHOLE ? gpu_ns : gpu_ns * scale / WHOLE;
}

bool vgpu_neighboured(unsigned card) {
    return atomic_load_explicit(&cards[card].neighboured_until, memory_order_relaxed) != 0;
}

bool vgpu_contended(unsigned card) {
    return atomic_load_explicit(&cards[card].until, memory_order_relaxed) != 0;
}
