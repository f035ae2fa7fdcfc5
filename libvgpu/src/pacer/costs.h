/* What launches cost: an estimate of the mean GPU time per key (function, rounded grid, block; or a graph). */
#ifndef VGPU_COSTS_H
#define VGPU_COSTS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* with this many samples an estimate counts as converged; before that every launch is measured and pays its real
 * time */
#define VGPU_COST_SETTLED 16u
#define VGPU_COST_RECENT 32u /* samples that an estimate remembers */

struct vgpu_cost {
    _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t mean_ns;
    /* set where no launch could be measured: the longest time that a recent launch can have taken; 0: unknown */
    _Atomic uint64_t bound_ns;
    _Atomic uint32_t samples;
    _Atomic uint32_t flying;   /* launches under measurement */
    _Atomic uint64_t since_ns; /* CLOCK_MONOTONIC; no measured launch under way is older */
    _Atomic uint32_t waited;   /* a thread has waited for the first sample */
    _Atomic uint32_t meaning;  /* grows when the handle of the key may now mean something else */
    /* number of doubts about all estimates, as of the last time this estimate was confirmed */
    _Atomic uint32_t doubts;
    _Atomic uint32_t wide;   /* the times differ without any neighbour */
    _Atomic uint32_t queued; /* queued samples have come lately: their launches waited for no other work */
    _Atomic uint32_t passed; /* samples that were not queued and were ignored since then */
    _Atomic uint32_t spoilt; /* measurements since the last exact one */
    _Atomic uint32_t recent[VGPU_COST_RECENT]; /* ns, newest at samples - 1; 0: none */
};

/* Returns the record of a key and makes the record on first use. Keys without room share one record that never learns.
 * Never fails. */
struct vgpu_cost *vgpu_cost_of(uint64_t key);
static inline bool vgpu_cost_known(const struct vgpu_cost *cost) {
    return atomic_load_explicit(&cost->samples, memory_order_acquire) > 0;
}
/* Known, and not only from what the key meant before. */
static inline bool vgpu_cost_sure(const struct vgpu_cost *cost) {
    return atomic_load_explicit(&cost->samples, memory_order_acquire) > 1;
}
/* Begin and end of a measured launch that was recorded at this time, CLOCK_MONOTONIC ns. */
static inline void vgpu_cost_flies(struct vgpu_cost *cost, uint64_t recorded_ns) {
    if (atomic_fetch_add(&cost->flying, 1) == 0)
        atomic_store_explicit(&cost->since_ns, recorded_ns, memory_order_relaxed);
}
static inline void vgpu_cost_landed(struct vgpu_cost *cost, uint64_t recorded_ns) {
    /* launches still under way were recorded later, as a rule */
    if (recorded_ns > atomic_load_explicit(&cost->since_ns, memory_order_relaxed))
        atomic_store_explicit(&cost->since_ns, recorded_ns, memory_order_relaxed);
    atomic_fetch_sub(&cost->flying, 1);
}
/* For how long, at most, a measured launch of this key has been under way; 0: no measured launch is. */
static inline uint64_t vgpu_cost_age(const struct vgpu_cost *cost, uint64_t now) {
    const uint64_t since = atomic_load_explicit(&cost->since_ns, memory_order_relaxed);
    return atomic_load_explicit(&cost->flying, memory_order_relaxed) && now > since ? now - since : 0;
}
enum vgpu_company {
    VGPU_UNSURE,  /* too early to tell: treated as alone, but nothing is concluded from it */
    VGPU_ALONE,   /* the only user of the card */
    VGPU_SHARING, /* others use the card: a sample may contain their work, or the switch from them to this process */
};
/* Takes a sample. queued: the launch followed earlier work of its stream and waited for no other work.
 * - Alone: the mean over the first 32 samples, then over about the last 32, so that the mean follows a program that
 *   changes.
 * - Sharing: the mean of the recent samples that look undisturbed, unless the times are known to differ by themselves.
 * - Where queued samples come, samples of short kernels and samples taken while sharing count only if queued. */
void vgpu_cost_learn(struct vgpu_cost *cost, uint64_t gpu_ns, enum vgpu_company company, bool queued);
/* Takes a bound: a launch took at most `most_ns`, and nothing else is known of it. */
void vgpu_cost_bounded(struct vgpu_cost *cost, uint64_t most_ns);
/* A measurement shows that the estimate is far too small: from now on the estimate counts for little. */
void vgpu_cost_refuted(struct vgpu_cost *cost);
/* The handle behind a key (0: any key) may now mean something else. The estimate stays as a guess, and the next sample
 * outweighs it. */
void vgpu_cost_doubt(uint64_t key);
/* xorshift64: Marsaglia, Xorshift RNGs, 2003. The state is not 0. */
static inline uint64_t vgpu_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 8; /* its upper bits are the better ones */
}
/* Key of a launch of `function`, never 0: the number of blocks counts by its magnitude. A caller that needs few bits
 * takes the upper ones. */
static inline uint64_t vgpu_cost_key(const void *function, uint64_t blocks, uint64_t threads) {
    const uint64_t magnitude = 64u - (unsigned)__builtin_clzll((2 * blocks - 1) | 1);
    return (((uint64_t)(uintptr_t)function ^ magnitude << 56 ^ threads << 44) | 1) * 0xff51afd7ed558ccdull;
}
#endif
