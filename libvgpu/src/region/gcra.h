/* The generic cell rate algorithm in GPU time: one number per card, the theoretical arrival time (tat), paces all
 * launches of a container.
 *
 * A launch that costs `price` nanoseconds of wall time (GPU time * 100 / limit) may start at max(tat, now - burst) and
 * moves tat on by its price. Pure arithmetic on one shared word: no locks, nothing to repair when a process dies. */
#ifndef VGPU_GCRA_H
#define VGPU_GCRA_H
#include <stdatomic.h>
#include <stdint.h>

/* Wall time that `gpu_ns` of GPU time take at a limit of `percent` (1 to 99). */
static inline uint64_t vgpu_gcra_price(uint64_t gpu_ns, uint32_t percent) {
    return gpu_ns * 100 / percent;
}

/* Reserves; returns the caller's own start, for which the caller waits. */
static inline uint64_t vgpu_gcra_reserve(_Atomic uint64_t *tat, uint64_t now, uint64_t price, uint64_t burst) {
    uint64_t earliest = now > burst ? now - burst : 0;
    uint64_t seen = atomic_load_explicit(tat, memory_order_relaxed), start;
    do {
        start = seen > earliest ? seen : earliest;
    } while (!atomic_compare_exchange_weak(tat, &seen, start + price));
    return start;
}

/* Corrects a reservation by the difference of the prices; negative: the price was too high. */
static inline void vgpu_gcra_settle(_Atomic uint64_t *tat, int64_t difference) {
    uint64_t seen = atomic_load_explicit(tat, memory_order_relaxed), next;
    do {
        next = difference < 0 && seen < (uint64_t)-difference ? 0 : seen + (uint64_t)difference;
    } while (!atomic_compare_exchange_weak(tat, &seen, next));
}
#endif
