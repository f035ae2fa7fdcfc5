/* Which blocks the tier would move: known cases, and random programs whose every plan has to be possible. Prints
 * nothing and ends with 0, or names the check that failed. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "tier/policy.h"

#define MOST 8192u
#define PLENTY (1u << 30)

static struct vgpu_tier tier;
static struct vgpu_tier_block blocks[MOST];
static struct vgpu_tier_plan plan;
static uint64_t noise = 1;

static uint32_t below(uint32_t bound) {
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((noise >> 33) * bound >> 31);
}

static void start(void) {
    memset(blocks, 0xee, sizeof blocks); /* nothing is expected of the caller's memory */
    vgpu_tier_begin(&tier, blocks, MOST);
}

static uint32_t on_device(uint64_t bytes) {
    return vgpu_tier_add(&tier, bytes, true, false);
}

static uint32_t in_host(uint64_t bytes) {
    return vgpu_tier_add(&tier, bytes, false, false);
}

static void touch(uint32_t index, unsigned launches) {
    for (unsigned i = 0; i < launches; i++)
        vgpu_tier_launch(&tier, &index, 1);
}

static void follow(void) {
    for (uint32_t i = 0; i < plan.downs; i++)
        vgpu_tier_moved(&tier, plan.down[i], false);
    for (uint32_t i = 0; i < plan.ups; i++)
        vgpu_tier_moved(&tier, plan.up[i], true);
}

static void check_entries(void) {
    vgpu_tier_begin(&tier, blocks, 2);
    CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan) && !vgpu_tier_plan(&tier, -1, PLENTY, &plan));
    CHECK(on_device(1) == 0 && in_host(1) == 1 && in_host(1) == VGPU_TIER_NONE);
    vgpu_tier_remove(&tier, 0);
    vgpu_tier_launch(&tier, NULL, 0);
    CHECK(in_host(1) == 0 && on_device(1) == VGPU_TIER_NONE);
    vgpu_tier_remove(&tier, 0);
    vgpu_tier_remove(&tier, 1);
    CHECK(!vgpu_tier_plan(&tier, PLENTY, PLENTY, &plan) && tier.movable == 0);
    CHECK(in_host(1) == 1 && in_host(1) == 0);
}

static void check_exchange(void) {
    start();
    const uint32_t cold = on_device(10), warm = on_device(10), hot = in_host(10);
    const uint32_t both[2] = {hot, warm};
    touch(cold, 1);
    for (unsigned i = 0; i < 40; i++)
        vgpu_tier_launch(&tier, both, 2);
    CHECK(vgpu_tier_plan(&tier, 0, PLENTY, &plan));
    CHECK(plan.ups == 1 && plan.up[0] == hot && plan.downs == 1 && plan.down[0] == cold && plan.bytes == 20);
    CHECK(!vgpu_tier_plan(&tier, 0, 19, &plan));
    CHECK(vgpu_tier_plan(&tier, 0, 20, &plan));
    follow();
    for (unsigned i = 0; i < 1000; i++) {
        vgpu_tier_launch(&tier, both, 2);
        CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan));
    }
}

/* A sweep over twice as much as fits costs no more than if nothing moved, also where each block is used some times
 * before the next one; where it is used so often that moves pay, less. Plain sweeps move nothing at all. */
static void check_sweeps(void) {
    enum { COUNT = 24, ROUNDS = 40 };
    for (unsigned times = 1; times < 150; times = times * 3 / 2 + 1) {
        uint64_t bus = 0, moved = 0;
        start();
        for (unsigned i = 0; i < COUNT; i++)
            vgpu_tier_add(&tier, 1, i < COUNT / 2, false);
        for (uint32_t i = 0; i < ROUNDS * COUNT * times; i++) {
            const uint32_t index = i / times % COUNT;
            bus += !blocks[index].on_device;
            vgpu_tier_launch(&tier, &index, 1);
            while (vgpu_tier_plan(&tier, 0, PLENTY, &plan)) {
                moved += plan.bytes;
                follow();
            }
        }
        const double never = COUNT / 2 * times * ROUNDS;
        CHECK((double)(bus + moved) <= 1.02 * never);
        CHECK(times <= 2 ? moved == 0 : times < 60 || (double)(bus + moved) < 0.6 * never);
    }
}

static void check_named_twice(void) {
    start();
    const uint32_t index = in_host(1), twice[3] = {index, index, index};
    vgpu_tier_launch(&tier, twice, 3);
    vgpu_tier_launch(&tier, twice, 3);
    CHECK(blocks[index].touches == 2 && tier.misses == 2 * tier.weight);
}

static void check_pinned(void) {
    start();
    const uint32_t kept = vgpu_tier_add(&tier, 1, true, true), hot = in_host(1);
    touch(kept, 1);
    touch(hot, 100);
    CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan) && !vgpu_tier_plan(&tier, -1, PLENTY, &plan));
    const uint32_t cold = on_device(1);
    vgpu_tier_pin(&tier, hot, true);
    touch(hot, 100);
    CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan));
    vgpu_tier_pin(&tier, hot, false);
    touch(hot, 16);
    CHECK(vgpu_tier_plan(&tier, 0, PLENTY, &plan) && plan.up[0] == hot && plan.downs == 1 && plan.down[0] == cold);
    vgpu_tier_pin(&tier, kept, false);
    CHECK(vgpu_tier_plan(&tier, -2, PLENTY, &plan) && plan.downs == 2);
}

static void check_room(void) {
    start();
    const uint32_t hot = in_host(10), once = in_host(1);
    touch(once, 1);
    touch(hot, 1);
    CHECK(!vgpu_tier_plan(&tier, 100, PLENTY, &plan)); /* touched once: nobody knows */
    touch(hot, 20);
    CHECK(!vgpu_tier_plan(&tier, 9, PLENTY, &plan));
    CHECK(vgpu_tier_plan(&tier, 10, PLENTY, &plan) && plan.ups == 1 && plan.up[0] == hot && plan.downs == 0 &&
          plan.bytes == 10);
    follow();
    CHECK(!vgpu_tier_plan(&tier, 100, PLENTY, &plan));
}

static void check_sizes(void) {
    enum { SMALL = 8 };
    uint32_t small[SMALL];
    start();
    const uint32_t large = on_device(SMALL);
    for (unsigned i = 0; i < SMALL; i++)
        small[i] = in_host(1);
    touch(large, 2);
    for (unsigned i = 0; i < 4; i++)
        vgpu_tier_launch(&tier, small, SMALL);
    CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan));
    for (unsigned i = 0; i < 26; i++)
        vgpu_tier_launch(&tier, small, SMALL);
    /* none of the small ones would pay for the large one's move */
    CHECK(vgpu_tier_plan(&tier, 0, PLENTY, &plan) && plan.downs == 1 && plan.down[0] == large && plan.ups == SMALL &&
          plan.bytes == 2 * SMALL);
    CHECK(vgpu_tier_plan(&tier, 0, SMALL + 3, &plan) && plan.downs == 1 && plan.ups == 3 && plan.bytes == SMALL + 3);
    follow();
    for (uint32_t i = 0; i < plan.ups; i++)
        vgpu_tier_moved(&tier, plan.up[i], false);
    for (unsigned i = 0; i < SMALL; i++)
        vgpu_tier_moved(&tier, small[i], true);
    touch(large, 200);
    CHECK(vgpu_tier_plan(&tier, 0, PLENTY, &plan) && plan.ups == 1 && plan.up[0] == large && plan.downs == SMALL);

    start();
    const uint32_t huge = in_host(4), used = on_device(2), idle = on_device(1);
    for (unsigned i = 0; i < 400; i++) {
        touch(huge, 1);
        touch(used, 1);
    }
    CHECK(!vgpu_tier_plan(&tier, 0, PLENTY, &plan)); /* both are not enough */
    CHECK(vgpu_tier_plan(&tier, 1, PLENTY, &plan) && plan.ups == 1 && plan.up[0] == huge && plan.downs == 2 &&
          plan.bytes == 7);
    /* what is idle need not go, too */
    CHECK(vgpu_tier_plan(&tier, 2, PLENTY, &plan) && plan.downs == 1 && plan.down[0] == used);
    CHECK(vgpu_tier_plan(&tier, 3, PLENTY, &plan) && plan.downs == 1 && plan.down[0] == idle);
    CHECK(!vgpu_tier_plan(&tier, 1, 6, &plan) && !vgpu_tier_plan(&tier, 0, 3, &plan));
}

static void check_giving_way(void) {
    start();
    const uint32_t large = on_device(100), hot = on_device(5), other = on_device(5), host = in_host(5),
                   all[3] = {large, hot, other};
    for (unsigned i = 0; i < 20; i++)
        vgpu_tier_launch(&tier, all, 3);
    touch(hot, 50);
    touch(host, 1);
    CHECK(vgpu_tier_plan(&tier, -1, PLENTY, &plan) && plan.ups == 0 && plan.downs == 1 && plan.down[0] == other &&
          plan.bytes == 5);
    CHECK(vgpu_tier_plan(&tier, -5, 1, &plan) && plan.downs == 1 && plan.down[0] == other); /* one at least */
    CHECK(vgpu_tier_plan(&tier, -105, 5, &plan) && plan.downs == 1);
    CHECK(vgpu_tier_plan(&tier, -101, PLENTY, &plan) && plan.bytes >= 101 && plan.downs == 2);
    CHECK(vgpu_tier_plan(&tier, -1000, PLENTY, &plan) && plan.bytes == 110 && plan.downs == 3);
    CHECK(vgpu_tier_plan(&tier, INT64_MIN, PLENTY, &plan) && plan.downs == 3);
}

/* Many small blocks that are used stay, and the large one goes that is not; who has just come is not taken for cold. */
static void check_cold(void) {
    uint32_t small[20];
    start();
    const uint32_t large = on_device(100);
    for (unsigned i = 0; i < 20; i++)
        small[i] = on_device(5);
    touch(large, 3);
    for (unsigned i = 0; i < 10; i++)
        vgpu_tier_launch(&tier, small, 20);
    CHECK(vgpu_tier_plan(&tier, -100, PLENTY, &plan) && plan.downs == 1 && plan.down[0] == large);

    start();
    const uint32_t seldom = on_device(1), hot = in_host(1);
    for (unsigned i = 0; i < 10; i++) {
        touch(seldom, 1);
        touch(hot, 10);
    }
    const uint32_t fresh = on_device(1), both[2] = {fresh, hot};
    vgpu_tier_launch(&tier, both, 2);
    CHECK(vgpu_tier_plan(&tier, 0, PLENTY, &plan) && plan.up[0] == hot && plan.downs == 1 && plan.down[0] == seldom);
}

/* When the program turns to another working set, all of it is soon on the device, and little else has moved. */
static void check_new_phase(void) {
    enum { ALL = 64, ROOM = 32, SET = 24 };
    start();
    for (unsigned i = 0; i < ALL; i++)
        vgpu_tier_add(&tier, 1, i < ROOM, false);
    for (uint32_t phase = 0; phase < 6; phase++) {
        const uint32_t first = phase % 2 * ROOM;
        unsigned moves = 0;
        for (unsigned i = 0; i < 2000; i++) {
            const uint32_t touched[3] = {first + below(SET), first + below(SET), first + below(SET)};
            vgpu_tier_launch(&tier, touched, 3);
            while (vgpu_tier_plan(&tier, 0, PLENTY, &plan)) {
                CHECK(plan.ups == plan.downs);
                moves += plan.ups;
                follow();
            }
            for (uint32_t k = first; i > 300 && k < first + SET; k++)
                CHECK(blocks[k].on_device);
        }
        CHECK(phase == 0 ? moves == 0 : moves >= 2 * SET - ROOM && moves <= SET + 8);
    }
}

/* Blocks that are used for a while and rest, again and again: at the end of each while they are on the device, also
 * when the first one was short. */
static void check_visits(void) {
    enum { GROUP = 8, VISIT = 800 };
    start();
    const uint32_t other = on_device(1), late = in_host(1), both[2] = {other, late};
    touch(late, 2);
    touch(other, 1000);
    for (unsigned i = 1; i <= 50; i++) { /* from the fortieth touch on, these are its history */
        touch(other, 1);
        vgpu_tier_launch(&tier, both, 2);
        const struct vgpu_tier_block *block = &blocks[late];
        const double length = (double)(block->last - block->since), span = (tier.sum - block->birth) / tier.weight;
        CHECK(block->touches == (i < 40 ? i + 2 : i) && (length == 2.0 * (i - 1)) == (i >= 40));
        CHECK(i < 40 || fabs(block->heat / tier.weight / span - 0.5) < 0.02);
        CHECK(i != 40 ||
              (block->longest == 0 && block->lately == 8 && fabs(block->squares * 39 / length / length - 2) < 0.01));
    }
    start();
    for (unsigned i = 0; i < 3 * GROUP; i++)
        vgpu_tier_add(&tier, 1, i < GROUP, false);
    for (uint32_t visit = 0; visit < 12; visit++) {
        const uint32_t first = visit % 3 * GROUP;
        for (unsigned i = 0; i < (visit < 3 ? 80 : VISIT); i++) {
            const uint32_t touched = first + i % GROUP;
            vgpu_tier_launch(&tier, &touched, 1);
            while (vgpu_tier_plan(&tier, 0, PLENTY, &plan))
                follow();
        }
        for (uint32_t k = first; visit > 3 && k < first + GROUP; k++)
            CHECK(blocks[k].on_device);
    }
}

/* After any number of launches the figures are what they were after few. */
static void check_billions(void) {
    for (unsigned shift = 0; shift < 64; shift += 21) {
        start();
        tier.now = shift ? 1ull << shift : 0;
        for (unsigned i = 0; i < 8; i++)
            vgpu_tier_add(&tier, 1ull << 40, i >= 4, false);
        for (unsigned i = 0; i < 400000; i++) {
            if (i == 300000)
                for (unsigned rest = 0; rest < 2000; rest++)
                    vgpu_tier_launch(&tier, NULL, 0);
            const uint32_t touched[2] = {below(4), 4 + below(i % 5 ? 3 : 4)};
            vgpu_tier_launch(&tier, touched, 2);
        }
        CHECK(fabs(tier.sum / tier.weight / VGPU_TIER_WINDOW - 1) < 0.02);
        CHECK(fabs(tier.usual_gap / 4 - 1) < 0.02 && tier.weight < 0x1p32);
        for (unsigned i = 0; i < 7; i++) {
            const double span = (tier.sum - blocks[i].birth) / tier.weight, rate = blocks[i].heat / tier.weight / span;
            CHECK(fabs(rate / (i < 4 ? 0.25 : 0.3167) - 1) < 0.15 && blocks[i].longest < 1000);
        }
        CHECK(blocks[7].touches > 100 && blocks[7].touches < 2000); /* old ones are forgotten */
        CHECK(vgpu_tier_plan(&tier, 0, UINT64_MAX, &plan) && plan.ups == 1 && plan.down[0] == 7 &&
              plan.bytes == 2ull << 40);
    }
}

/* Where blocks are touched seldom, touches are remembered for longer. */
static void check_window(void) {
    start();
    for (unsigned i = 0; i < 1024; i++)
        vgpu_tier_add(&tier, 1, i < 512, false);
    for (unsigned i = 0; i < 200000; i++)
        touch(below(1024), 1);
    CHECK(tier.sum / tier.weight > 16 * VGPU_TIER_WINDOW && fabs(tier.usual_gap / 1024 - 1) < 0.02);
}

/* Among more blocks than one look sees, the one that matters is found, and room for it. */
static void check_many(void) {
    start();
    for (uint32_t i = 0; i < MOST; i++)
        vgpu_tier_add(&tier, 1, i % 2, false);
    for (uint32_t i = 0; i < MOST; i += 64) {
        uint32_t touched[64];
        for (uint32_t k = 0; k < 64; k++)
            touched[k] = i + k;
        vgpu_tier_launch(&tier, touched, 64);
    }
    const uint32_t hot = 4242;
    bool found = false;
    for (unsigned i = 0; i < 2000 && !found; i++) {
        touch(hot, 1);
        found = vgpu_tier_plan(&tier, 0, PLENTY, &plan);
    }
    CHECK(found && plan.ups == 1 && plan.up[0] == hot && plan.downs == 1 && plan.down[0] % 2);
}

static void check_possible(int64_t room, uint64_t budget) {
    uint64_t bytes = 0;
    int64_t after = room;
    CHECK(plan.ups + plan.downs > 0 && plan.ups <= VGPU_TIER_MOVES && plan.downs <= VGPU_TIER_MOVES);
    for (uint32_t i = 0; i < plan.downs; i++) {
        const struct vgpu_tier_block *block = &blocks[plan.down[i]];
        CHECK(block->bytes && block->on_device && !block->pinned);
        for (uint32_t k = 0; k < i; k++)
            CHECK(plan.down[k] != plan.down[i]);
        bytes += block->bytes;
        after += (int64_t)block->bytes;
    }
    for (uint32_t i = 0; i < plan.ups; i++) {
        const struct vgpu_tier_block *block = &blocks[plan.up[i]];
        CHECK(block->bytes && !block->on_device && !block->pinned);
        for (uint32_t k = 0; k < i; k++)
            CHECK(plan.up[k] != plan.up[i]);
        bytes += block->bytes;
        after -= (int64_t)block->bytes;
    }
    CHECK(bytes == plan.bytes);
    CHECK(room < 0 ? plan.ups == 0 && (bytes <= budget || plan.downs == 1) : after >= 0 && bytes <= budget);
}

/* Blocks come, go, are pinned and touched at random, and the room changes; what is believed of them is what is so. */
static void check_random_programs(void) {
    enum { COUNT = 200, STEPS = 30000 };
    for (unsigned seed = 1; seed <= 4; seed++) {
        unsigned plans = 0;
        bool live[COUNT] = {false};
        int64_t room = 3000;
        start();
        tier.capacity = COUNT;
        noise = seed;
        for (unsigned step = 0; step < STEPS; step++) {
            const uint32_t chosen = below(COUNT), what = below(100);
            if (what < 3) {
                const uint64_t bytes = 1 + below(1u << below(8));
                const bool device = (int64_t)bytes <= room;
                const uint32_t index = vgpu_tier_add(&tier, bytes, device, below(10) == 0);
                if (index != VGPU_TIER_NONE) {
                    CHECK(!live[index]);
                    live[index] = true;
                    room -= device ? (int64_t)bytes : 0;
                }
            } else if (what < 4 && live[chosen]) {
                room += blocks[chosen].on_device ? (int64_t)blocks[chosen].bytes : 0;
                live[chosen] = false;
                vgpu_tier_remove(&tier, chosen);
            } else if (what < 5 && live[chosen]) {
                vgpu_tier_pin(&tier, chosen, below(10) == 0);
            } else if (what < 6) {
                room += (int64_t)below(2000) - 1000;
                room = room > 4000 ? 4000 : room;
            } else {
                uint32_t touched[8], count = 0;
                for (unsigned i = 0; i < 8; i++) {
                    const uint32_t index = below(1 + below(COUNT));
                    if (live[index])
                        touched[count++] = index;
                }
                vgpu_tier_launch(&tier, touched, count);
            }
            const uint64_t budget = below(4) ? PLENTY : below(300);
            if (vgpu_tier_plan(&tier, room, budget, &plan)) {
                check_possible(room, budget);
                for (uint32_t i = 0; i < plan.downs; i++)
                    room += (int64_t)blocks[plan.down[i]].bytes;
                for (uint32_t i = 0; i < plan.ups; i++)
                    room -= (int64_t)blocks[plan.up[i]].bytes;
                follow();
                plans++;
            }
            uint32_t movable = 0;
            for (uint32_t i = 0; i < COUNT; i++)
                movable += live[i] && !blocks[i].pinned;
            CHECK(movable == tier.movable);
        }
        CHECK(plans > 100);
    }
}

int main(void) {
    check_entries();
    check_exchange();
    check_sweeps();
    check_named_twice();
    check_pinned();
    check_room();
    check_sizes();
    check_giving_way();
    check_cold();
    check_new_phase();
    check_visits();
    check_billions();
    check_window();
    check_many();
    check_random_programs();
    return 0;
}
