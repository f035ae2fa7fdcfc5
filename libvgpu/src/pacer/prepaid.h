/* The fast path for a launch that its thread has paid in advance: a few comparisons, then the hook calls the driver.
 * Inline, so that a hook need not keep its arguments across a call. The rest is in pacer.c. */
#ifndef VGPU_PREPAID_H
#define VGPU_PREPAID_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ledger/attach.h"
#include "pacer/costs.h"
#include "pacer/launch_sources.h"
#include "reserves/capture.h"

#define VGPU_PREPAID_KEYS 8u /* keys that a thread remembers; power of two */

/* What the calling thread may spend without looking up. */
struct vgpu_prepaid {
    uint32_t epoch;    /* version of all fields; if it differs, all are invalid */
    uint32_t left;     /* launches until the thread looks up again */
    uint64_t left_ns;  /* GPU time paid and not spent */
    uint64_t selector; /* selector of the limits that were in force */
    CUstream stream;   /* the last stream, and its place in `sources` */
    uint64_t source;
    uint64_t sources; /* sources of launches since the last look-up, see vgpu_sources_member */
    struct {
        uint64_t key;
        const struct vgpu_cost *cost;
    } known[VGPU_PREPAID_KEYS]; /* short launches whose cost is settled */
};

extern __thread __attribute__((tls_model("initial-exec"))) struct vgpu_prepaid vgpu_prepaid;
extern _Atomic uint32_t vgpu_prepaid_epoch;
/* VGPU_ONE_CARD: the process sees one card, so vgpu need not ask where a launch goes. VGPU_ONE_CARD_GATED: the same,
 * but launches must pass the gate. */
enum { VGPU_SEVERAL_CARDS, VGPU_ONE_CARD, VGPU_ONE_CARD_GATED };
extern _Atomic uint8_t vgpu_one_card;

static inline unsigned vgpu_prepaid_place(uint64_t key) {
    return (unsigned)(key / (UINT64_MAX / VGPU_PREPAID_KEYS + 1));
}

/* True if the thread has paid for a launch of this key, on any stream. Also returns the price. */
static inline __attribute__((always_inline)) bool vgpu_prepaid_covers(uint64_t key, uint64_t *price) {
    const unsigned at = vgpu_prepaid_place(key);
    if (vgpu_prepaid.known[at].key != key || !vgpu_prepaid.left ||
        vgpu_prepaid.epoch != atomic_load_explicit(&vgpu_prepaid_epoch, memory_order_relaxed))
        return false;
    const struct vgpu_local *local = atomic_load_explicit(&vgpu_local_memory, memory_order_acquire);
    *price = atomic_load_explicit(&vgpu_prepaid.known[at].cost->mean_ns, memory_order_relaxed);
    return vgpu_prepaid.left_ns >= *price &&
           vgpu_prepaid.selector == atomic_load_explicit(&vgpu_mapped.limits->selector, memory_order_relaxed) &&
           !vgpu_any_capture() && !vgpu_sources_watches() &&
           !atomic_load_explicit(&local->owner_pid, memory_order_relaxed) &&
           atomic_load_explicit(&local->enforced, memory_order_relaxed);
}

static inline __attribute__((always_inline)) void vgpu_prepaid_spend(uint64_t price, CUstream stream) {
    if (__builtin_expect(stream != vgpu_prepaid.stream || !vgpu_prepaid.source, 0)) {
        vgpu_prepaid.stream = stream;
        vgpu_prepaid.source = vgpu_sources_member(stream, &vgpu_prepaid);
    }
    vgpu_prepaid.sources |= vgpu_prepaid.source;
    vgpu_prepaid.left--;
    vgpu_prepaid.left_ns -= price;
}

/* True if the calling thread has paid this launch in advance: the hook can call the driver at once. False: see
 * vgpu_pacer_before. `key` comes from vgpu_cost_key. `stream` is as the driver will understand it (CU_STREAM_PER_THREAD
 * spelled out). A launch that the driver then refuses stays paid: 25 us of GPU time as a rule, or the estimate's newer
 * value. Never more than the 50 us that a thread pays in advance. Without a limit, never more than the millisecond that
 * a thread keeps uncounted. */
static inline __attribute__((always_inline)) bool vgpu_pacer_prepaid(uint64_t key, CUstream stream) {
    uint64_t price;
    if (atomic_load_explicit(&vgpu_one_card, memory_order_relaxed) != VGPU_ONE_CARD ||
        !vgpu_prepaid_covers(key, &price))
        return false;
    vgpu_prepaid_spend(price, stream);
    return true;
}

/* The same for a launch that passes the gate. */
static inline __attribute__((always_inline)) bool vgpu_pacer_prepaid_gated(uint64_t key, CUstream stream) {
    uint64_t price;
    if (atomic_load_explicit(&vgpu_one_card, memory_order_relaxed) != VGPU_ONE_CARD_GATED ||
        !vgpu_prepaid_covers(key, &price))
        return false;
    vgpu_prepaid_spend(price, stream);
    return true;
}
#endif
