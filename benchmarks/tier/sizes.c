#include "sizes.h"

#include <stdbool.h>
#include <stdlib.h>

#include "tier/policy.h"
#include "trace.h"

struct block {
    double until; /* of the sum of the weights of this block and those before it */
    uint64_t bytes, touches;
    bool at_first; /* on the device */
};

static int by_touches(const void *one, const void *other) {
    const uint64_t a = ((const struct block *)one)->touches, b = ((const struct block *)other)->touches;
    return a < b ? 1 : a > b ? -1 : 0;
}

static uint32_t draw(const struct block *blocks, uint32_t count, uint64_t *random) {
    const double at = uniform(random) * blocks[count - 1].until;
    uint32_t low = 0, high = count - 1;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (blocks[middle].until < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int64_t make_blocks(struct vgpu_tier *tier, struct block *blocks, uint32_t count, uint32_t largest,
                           uint64_t *random) {
    uint32_t kinds = 1, *order = malloc(count * sizeof *order);
    uint64_t all = 0;
    if (!order)
        abort();
    while (1u << kinds <= largest)
        kinds++;
    for (uint32_t i = 0; i < count; i++) {
        blocks[i].bytes = 1ull << below(random, kinds);
        all += blocks[i].bytes;
        order[i] = i;
    }
    int64_t room = (int64_t)(all / 2);
    shuffle(random, order, count);
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        blocks[i].until = sum += 1.0 / (order[i] + 1); /* any rank: blocks are in the order of their making */
        blocks[i].at_first = (int64_t)blocks[i].bytes <= room;
        room -= blocks[i].at_first ? (int64_t)blocks[i].bytes : 0;
        vgpu_tier_add(tier, blocks[i].bytes, blocks[i].at_first, false);
    }
    free(order);
    return room;
}

static int64_t follow(struct vgpu_tier *tier, const struct vgpu_tier_plan *plan) {
    int64_t room = 0;
    for (uint32_t i = 0; i < plan->downs; i++) {
        vgpu_tier_moved(tier, plan->down[i], false);
        room += (int64_t)tier->blocks[plan->down[i]].bytes;
    }
    for (uint32_t i = 0; i < plan->ups; i++) {
        vgpu_tier_moved(tier, plan->up[i], true);
        room -= (int64_t)tier->blocks[plan->up[i]].bytes;
    }
    return room;
}

static uint64_t place_in_hindsight(struct block *blocks, uint32_t count) {
    uint64_t bus = 0, left = 0;
    for (uint32_t i = 0; i < count; i++)
        left += blocks[i].bytes;
    left /= 2;
    qsort(blocks, count, sizeof *blocks, by_touches);
    for (uint32_t i = 0; i < count; i++) {
        const bool fits = blocks[i].bytes <= left;
        left -= fits ? blocks[i].bytes : 0;
        bus += fits == blocks[i].at_first ? 0 : blocks[i].bytes;
        bus += fits ? 0 : blocks[i].bytes * blocks[i].touches;
    }
    return bus;
}

struct bus_times play_sizes(uint32_t count, uint32_t largest, uint32_t launches, uint64_t seed) {
    struct block *blocks = calloc(count, sizeof *blocks);
    struct vgpu_tier_block *entries = calloc(count, sizeof *entries);
    struct bus_times times = {0};
    struct vgpu_tier tier;
    struct vgpu_tier_plan plan;
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 1;
    if (!blocks || !entries)
        abort();
    vgpu_tier_begin(&tier, entries, count);
    int64_t room = make_blocks(&tier, blocks, count, largest, &random);
    for (uint32_t i = 0; i < launches; i++) {
        uint32_t touched[TOUCHED];
        for (uint32_t drawn = 0; drawn < TOUCHED;) {
            const uint32_t block = draw(blocks, count, &random);
            bool known = false;
            for (uint32_t k = 0; k < drawn; k++)
                known |= touched[k] == block;
            if (known)
                continue;
            touched[drawn++] = block;
            blocks[block].touches++;
            times.never += blocks[block].at_first ? 0 : blocks[block].bytes;
            times.policy += entries[block].on_device ? 0 : blocks[block].bytes;
        }
        vgpu_tier_launch(&tier, touched, TOUCHED);
        while (vgpu_tier_plan(&tier, room, UINT64_MAX, &plan)) {
            room += follow(&tier, &plan);
            times.policy += plan.bytes;
        }
    }
    times.hindsight = place_in_hindsight(blocks, count);
    free(blocks);
    free(entries);
    return times;
}
