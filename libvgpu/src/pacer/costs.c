/* Learns the mean GPU time of each kind of launch. */
#include "pacer/costs.h"

#define RECORDS 16384u /* power of two */
#define PROBES 32u
#define MOST_PASSED 64u
/* for kernels this short, an error of a microsecond matters; the start on an idle stream may be wrong by that much */
#define SHORT_NS 50000u

static struct vgpu_cost records[RECORDS];
/* for keys without a record of their own: its samples say nothing of the next launch */
static struct vgpu_cost overflow;

static _Atomic uint32_t doubts;

static void make_unsure(struct vgpu_cost *cost) {
    atomic_fetch_add_explicit(&cost->meaning, 1, memory_order_relaxed);
    if (atomic_load_explicit(&cost->samples, memory_order_relaxed) <= 1)
        return;
    for (unsigned i = 0; i < VGPU_COST_RECENT; i++)
        atomic_store_explicit(&cost->recent[i], 0, memory_order_relaxed);
    atomic_store_explicit(&cost->samples, 1, memory_order_relaxed);
    atomic_store_explicit(&cost->waited, 0, memory_order_relaxed);
    atomic_store_explicit(&cost->queued, 0, memory_order_relaxed);
}

static struct vgpu_cost *find(uint64_t key) {
    uint32_t slot = (uint32_t)(key * 0x9e3779b97f4a7c15ull >> 50);
    for (uint32_t i = 0; i < PROBES; i++, slot = (slot + 1) % RECORDS) {
        uint64_t there = atomic_load_explicit(&records[slot].key, memory_order_relaxed);
        if (there == key || (there == 0 && atomic_compare_exchange_strong(&records[slot].key, &there, key)) ||
            there == key)
            return &records[slot];
    }
    return &overflow;
}

struct vgpu_cost *vgpu_cost_of(uint64_t key) {
    struct vgpu_cost *cost = find(key);
    uint32_t now = atomic_load_explicit(&doubts, memory_order_relaxed);
    if (__builtin_expect(atomic_load_explicit(&cost->doubts, memory_order_relaxed) != now, 0) &&
        atomic_exchange(&cost->doubts, now) != now)
        make_unsure(cost);
    return cost;
}

void vgpu_cost_doubt(uint64_t key) {
    if (key)
        make_unsure(find(key));
    else
        atomic_fetch_add(&doubts, 1);
}

void vgpu_cost_bounded(struct vgpu_cost *cost, uint64_t most_ns) {
    const uint64_t before = atomic_load_explicit(&cost->bound_ns, memory_order_relaxed);
    atomic_store_explicit(&cost->bound_ns, before ? before - before / 2 + most_ns / 2 : most_ns, memory_order_relaxed);
}

void vgpu_cost_refuted(struct vgpu_cost *cost) {
    make_unsure(cost);
}

struct spread {
    uint64_t mean; /* of the samples up to `bound` */
    uint64_t bound;
    uint32_t count, beyond;
};

/* Mean of the recent samples that no neighbour has lengthened. Waiting only ever adds time, so the lower quarter is
 * clean if a quarter of the samples is. The spread of that quarter tells how far above it clean samples can lie. */
static struct spread undisturbed(const struct vgpu_cost *cost) {
    uint32_t sorted[VGPU_COST_RECENT], count = 0;
    for (uint32_t i = 0; i < VGPU_COST_RECENT; i++) {
        uint32_t value = atomic_load_explicit(&cost->recent[i], memory_order_relaxed), at = count;
        if (!value)
            continue;
        for (; at > 0 && sorted[at - 1] > value; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = value;
        count++;
    }
    uint64_t low = sorted[count / 20], quarter = sorted[count / 4], sum = 0;
    struct spread spread = {.bound = quarter + 3 * (quarter - low) + quarter / 50, .count = count};
    uint32_t clean = 0;
    for (; clean < count && sorted[clean] <= spread.bound; clean++)
        sum += sorted[clean];
    spread.mean = sum / clean;
    spread.beyond = count - clean;
    return spread;
}

static bool passed_over(struct vgpu_cost *cost, bool queued) {
    if (queued) {
        atomic_store_explicit(&cost->queued, 1, memory_order_relaxed);
        atomic_store_explicit(&cost->passed, 0, memory_order_relaxed);
    } else if (atomic_load_explicit(&cost->queued, memory_order_relaxed)) {
        if (atomic_fetch_add_explicit(&cost->passed, 1, memory_order_relaxed) < MOST_PASSED)
            return true;
        atomic_store_explicit(&cost->queued, 0, memory_order_relaxed);
    }
    return false;
}

void vgpu_cost_learn(struct vgpu_cost *cost, uint64_t gpu_ns, enum vgpu_company company, bool queued) {
    const bool contended = company == VGPU_SHARING;
    if (cost == &overflow) {
        vgpu_cost_bounded(cost, gpu_ns);
        return;
    }
    const bool is_short = vgpu_cost_known(cost) && gpu_ns <= SHORT_NS &&
                          atomic_load_explicit(&cost->mean_ns, memory_order_relaxed) <= SHORT_NS;
    const bool choosy = contended || is_short;
    if (choosy && passed_over(cost, queued))
        return;
    /* Two threads that learn at once may lose a sample, which does not harm a mean. */
    uint32_t samples = atomic_load_explicit(&cost->samples, memory_order_relaxed);
    uint32_t value = gpu_ns == 0 ? 1 : gpu_ns < UINT32_MAX ? (uint32_t)gpu_ns : UINT32_MAX;
    atomic_store_explicit(&cost->recent[samples % VGPU_COST_RECENT], value, memory_order_relaxed);
    samples++;
    uint64_t mean = atomic_load_explicit(&cost->mean_ns, memory_order_relaxed);
    if (contended && !atomic_load_explicit(&cost->wide, memory_order_relaxed)) {
        mean = undisturbed(cost).mean;
    } else {
        int64_t weight = samples < VGPU_COST_RECENT ? samples : VGPU_COST_RECENT;
        mean = (uint64_t)((int64_t)mean + ((int64_t)gpu_ns - (int64_t)mean) / weight);
    }
    if (company == VGPU_ALONE && samples % (VGPU_COST_RECENT / 8) == 0) {
        const struct spread spread = undisturbed(cost);
        atomic_store_explicit(&cost->wide, spread.beyond * 8 > spread.count, memory_order_relaxed);
    }
    atomic_store_explicit(&cost->mean_ns, mean, memory_order_relaxed);
    atomic_store_explicit(&cost->samples, samples ? samples : VGPU_COST_RECENT, memory_order_release);
}
