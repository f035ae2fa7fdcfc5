#include "costs.h"

#define RECORDS 4096u /* power of two */
#define PROBES 32u
#define MEMORY 32u    /* samples that an estimate remembers */

static struct vgpu_cost records[RECORDS];
static struct vgpu_cost overflow;

struct vgpu_cost *vgpu_cost_of(uint64_t key) {
    uint32_t slot = (uint32_t)(key * 0x9e3779b97f4a7c15ull >> 52);
    for (uint32_t i = 0; i < PROBES; i++, slot = (slot + 1) % RECORDS) {
        uint64_t there = atomic_load_explicit(&records[slot].key, memory_order_relaxed);
        if (there == key || (there == 0 && atomic_compare_exchange_strong(&records[slot].key, &there, key)) || there == key)
            return &records[slot];
    }
    return &overflow;
}

void vgpu_cost_learn(struct vgpu_cost *cost, uint64_t gpu_ns) {
    /* Two threads that learn at once may lose one of the samples: no harm to a mean. */
    uint32_t samples = atomic_load_explicit(&cost->samples, memory_order_relaxed) + 1;
    uint64_t mean = atomic_load_explicit(&cost->mean_ns, memory_order_relaxed);
    int64_t weight = samples < MEMORY ? samples : MEMORY;
    int64_t difference = (int64_t)gpu_ns - (int64_t)mean;
    atomic_store_explicit(&cost->mean_ns, (uint64_t)((int64_t)mean + difference / weight), memory_order_relaxed);
    atomic_store_explicit(&cost->samples, samples ? samples : MEMORY, memory_order_release);
}

bool vgpu_cost_chosen(uint64_t *random_state, uint32_t launches) {
    /* xorshift64: Marsaglia, Xorshift RNGs, 2003 */
    uint64_t x = *random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *random_state = x;
    return launches <= 1 || (uint32_t)(x >> 32) < UINT32_MAX / launches;
}

static unsigned log2_up(uint64_t value) {
    return value <= 1 ? 0 : 64u - (unsigned)__builtin_clzll(value - 1);
}

uint64_t vgpu_cost_key(const void *function, uint64_t blocks, uint64_t threads) {
    uint64_t key = (uint64_t)(uintptr_t)function;
    key = (key ^ (uint64_t)log2_up(blocks) << 56 ^ threads << 44) * 0xff51afd7ed558ccdull;
    key ^= key >> 33;
    return key ? key : 1;
}
