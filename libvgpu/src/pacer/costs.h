/* What launches cost: an estimate of the mean GPU time per key (function, rounded grid, block; or a graph). */
#ifndef VGPU_COSTS_H
#define VGPU_COSTS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* samples after which an estimate counts as converged; until then each launch is measured, and pays what it took */
#define VGPU_COST_SETTLED 16u
#define VGPU_COST_RECENT 32u /* samples that an estimate remembers */

struct vgpu_cost {
    _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t mean_ns;
    /* where no launch could be measured: the longest that one can have taken, of late; 0: not known */
    _Atomic uint64_t bound_ns;
    _Atomic uint32_t samples;
    _Atomic uint32_t flying;   /* launches under measurement */
    _Atomic uint64_t since_ns; /* CLOCK_MONOTONIC; no launch under measurement is older than this */
    _Atomic uint32_t waited;   /* somebody has waited for the first sample */
    _Atomic uint32_t meaning;  /* grows when the handle may have come to mean something else */
    _Atomic uint32_t doubts;   /* how often all estimates have been doubted when this one was last made sure of */
    _Atomic uint32_t wide;     /* the times differ by themselves, without neighbours */
    _Atomic uint32_t queued;   /* samples that waited for nobody have come lately */
    _Atomic uint32_t passed;   /* others that were passed over since */
    _Atomic uint32_t spoilt;   /* measurements since the last exact one */
    _Atomic uint32_t recent[VGPU_COST_RECENT]; /* ns, newest at samples - 1; 0: none */
};

/* The record of a key, made on first use; keys that find no room share one record, which never knows anything. Never
 * fails. */
struct vgpu_cost *vgpu_cost_of(uint64_t key);
static inline bool vgpu_cost_known(const struct vgpu_cost *cost) {
    return atomic_load_explicit(&cost->samples, memory_order_acquire) > 0;
}
/* And not merely of what the key stood for before. */
static inline bool vgpu_cost_sure(const struct vgpu_cost *cost) {
    return atomic_load_explicit(&cost->samples, memory_order_acquire) > 1;
}
/* A launch under measurement that was recorded at this time, CLOCK_MONOTONIC ns, begins and ends. */
static inline void vgpu_cost_flies(struct vgpu_cost *cost, uint64_t recorded_ns) {
    if (atomic_fetch_add(&cost->flying, 1) == 0)
        atomic_store_explicit(&cost->since_ns, recorded_ns, memory_order_relaxed);
}
static inline void vgpu_cost_landed(struct vgpu_cost *cost, uint64_t recorded_ns) {
    /* those that still fly were recorded later, as a rule */
    if (recorded_ns > atomic_load_explicit(&cost->since_ns, memory_order_relaxed))
        atomic_store_explicit(&cost->since_ns, recorded_ns, memory_order_relaxed);
    atomic_fetch_sub(&cost->flying, 1);
}
/* For how long a launch of this key has been under way at most; 0: none that is measured is. */
static inline uint64_t vgpu_cost_age(const struct vgpu_cost *cost, uint64_t now) {
    const uint64_t since = atomic_load_explicit(&cost->since_ns, memory_order_relaxed);
    return atomic_load_explicit(&cost->flying, memory_order_relaxed) && now > since ? now - since : 0;
}
enum vgpu_company {
    VGPU_UNSURE,  /* too early to tell; taken for alone, but nothing is concluded from it */
    VGPU_ALONE,   /* on the card */
    VGPU_SHARING, /* with others: a sample may contain their work, or the change from them to us */
};
/* Takes a sample in; queued: the launch followed earlier work of its stream and waited for nobody. Alone: the mean over
 * the first 32, afterwards over about the last 32, so that it follows a program that changes. Sharing: the mean of
 * those recent samples that look undisturbed, unless the times are known to differ by themselves. Where queued samples
 * come, those of short kernels and those taken while sharing do without the others. */
void vgpu_cost_learn(struct vgpu_cost *cost, uint64_t gpu_ns, enum vgpu_company company, bool queued);
/* A launch took `most_ns` at most, which is all that is known of it. */
void vgpu_cost_bounded(struct vgpu_cost *cost, uint64_t most_ns);
/* Measured: the estimate is far too small, so that it counts for little from now on. */
void vgpu_cost_refuted(struct vgpu_cost *cost);
/* The handle behind a key (0: any key) may now mean something else: the estimate stays, as a guess that the next sample
 * outweighs. */
void vgpu_cost_doubt(uint64_t key);
/* xorshift64: Marsaglia, Xorshift RNGs, 2003. The state is not 0. */
static inline uint64_t vgpu_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 8; /* its upper bits are the better ones */
}
/* Key of a launch of `function`, never 0: the number of blocks counts by its magnitude. Whoever needs few bits of it
 * takes the upper ones. */
static inline uint64_t vgpu_cost_key(const void *function, uint64_t blocks, uint64_t threads) {
    const uint64_t magnitude = 64u - (unsigned)__builtin_clzll((2 * blocks - 1) | 1);
    return (((uint64_t)(uintptr_t)function ^ magnitude << 56 ^ threads << 44) | 1) * 0xff51afd7ed558ccdull;
}
#endif
