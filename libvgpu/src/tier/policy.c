/* Decides which blocks belong on the card. Pure. */
#include "tier/policy.h"

#include <stddef.h>
#include <stdlib.h>

#define PERIOD 64u            /* least number of launches with the same weight */
#define LONGEST_PERIOD 0x1p16 /* the window stays below 2^24, which `heat` can count */
#define GROWTH (1.0 + (double)PERIOD / VGPU_TIER_WINDOW)
#define TOO_HEAVY 0x1p32 /* from this weight on, all weights are divided by it */
#define RECENT 1024u
#define CERTAINTY 1.5 /* standard errors */
#define UNUSUAL 4.0   /* standard errors of recent misses */
#define RESTED 4.0    /* mean gaps */
#define AWAY 16.0
/* a run of this many touches pays for three things: the moves of a block, the moves of the block that it replaces, and
 * finding out */
#define PAYING 40u
#define YOUNG 3u               /* with fewer touches a block's own gaps tell nothing */
#define GAPS_ENOUGH 16u        /* gaps counted before the oldest are forgotten */
#define UNKNOWN 0x1p64         /* launches */
#define LONGEST_GAP (1u << 26) /* longer gaps count as this long; a run of such gaps still fits into 32 bits */
#define POOL VGPU_TIER_MOVES   /* a plan chooses from this many coldest and this many hottest blocks */
#define TRIES 8u               /* this many of the hottest blocks are tried as the first to come up */
#define QUICK 0x1p100          /* a quick block sorts before any gain, because a gain is below the window */
#define CALM 16u               /* launches until another look can find something new */

/* A block on the device that could go down. */
struct cold {
    uint32_t index;
    bool rested;
    double rate, span, age, variance; /* variance of the rate */
};

/* A block in host memory that could come up. */
struct hot {
    uint32_t index;
    bool quick; /* the block may come up at once, for blocks that have rested */
    double rate, span, gap, variance;
};

/* The offered entries with the smallest keys, in order. */
struct pool {
    struct {
        double key;
        uint32_t index;
    } best[POOL];
    uint32_t count;
};

void vgpu_tier_begin(struct vgpu_tier *tier, struct vgpu_tier_block *blocks, uint32_t capacity) {
    *tier = (struct vgpu_tier){.blocks = blocks,
                               .capacity = capacity,
                               .free = VGPU_TIER_NONE,
                               .weight = 1,
                               .long_gap = UNKNOWN,
                               .period_end = PERIOD};
}

uint32_t vgpu_tier_add(struct vgpu_tier *tier, uint64_t bytes, bool on_device, bool pinned) {
    uint32_t index = tier->free;
    if (index != VGPU_TIER_NONE)
        tier->free = (uint32_t)tier->blocks[index].last;
    else if (tier->used < tier->capacity)
        index = tier->used++;
    else
        return VGPU_TIER_NONE;
    tier->blocks[index] = (struct vgpu_tier_block){.bytes = bytes,
                                                   .birth = tier->sum,
                                                   .since = tier->now,
                                                   .last = tier->now,
                                                   .on_device = on_device,
                                                   .pinned = pinned};
    tier->movable += !pinned;
    return index;
}

void vgpu_tier_remove(struct vgpu_tier *tier, uint32_t index) {
    tier->movable -= !tier->blocks[index].pinned;
    tier->blocks[index].bytes = 0;
    tier->blocks[index].last = tier->free;
    tier->free = index;
}

void vgpu_tier_pin(struct vgpu_tier *tier, uint32_t index, bool pinned) {
    tier->movable += tier->blocks[index].pinned;
    tier->movable -= pinned;
    tier->blocks[index].pinned = pinned;
}

void vgpu_tier_moved(struct vgpu_tier *tier, uint32_t index, bool on_device) {
    tier->blocks[index].on_device = on_device;
}

static uint32_t longest_of(const struct vgpu_tier_block *block) {
    return block->longest > block->lately ? block->longest : block->lately;
}

/* Whether a block last touched `age` launches ago has rested for `times` its mean gap and `longest_times` its longest
 * gap. */
static bool has_rested(const struct vgpu_tier_block *block, double age, double times, double longest_times) {
    return age > longest_times * longest_of(block) &&
           age * (block->touches - 1) > times * (double)(block->last - block->since);
}

static bool rested(const struct vgpu_tier *tier, const struct vgpu_tier_block *block) {
    const double age = (double)(tier->now - block->last);
    return block->touches < YOUNG ? age > RESTED / 2 * tier->usual_gap : has_rested(block, age, RESTED, 1);
}

static bool away(const struct vgpu_tier *tier, const struct vgpu_tier_block *block) {
    const double age = (double)(tier->now - block->last);
    return age > tier->long_gap && (block->touches < YOUNG || has_rested(block, age, AWAY, 2));
}

/* Drops the older half of the gaps. A loop longer than this has its longest gap in the younger half, which ends with
 * that gap. */
static void forget_old_gaps(struct vgpu_tier_block *block) {
    block->since += (block->last - block->since) / 2;
    block->touches = block->touches / 2 + 1;
    block->squares /= 2;
    block->longest = block->lately;
    block->lately = 0;
}

static void begin_history(const struct vgpu_tier *tier, struct vgpu_tier_block *block) {
    block->heat = block->squares = 0;
    block->birth = tier->sum;
    block->since = block->last = tier->now;
    block->longest = block->lately = block->run_length = 0;
    block->touches = block->run = 1;
}

/* The block's current run becomes its history. The run's gaps are treated as those of a Poisson process. */
static void begin_with_run(const struct vgpu_tier *tier, struct vgpu_tier_block *block) {
    const float gaps = (float)(block->run - 1), length = (float)block->run_length;
    block->heat = (float)tier->weight * gaps;
    block->birth = tier->sum - tier->weight * block->run_length;
    block->since = block->last - block->run_length;
    block->squares = 2 * length * length / gaps;
    block->longest = 0;
    block->lately = (uint32_t)((float)RESTED * length / gaps);
    block->touches = block->run;
}

/* A gap that is long for all blocks, and long for the block's run of touches before it. */
static bool is_rest(const struct vgpu_tier *tier, const struct vgpu_tier_block *block, double gap) {
    if (gap <= tier->long_gap)
        return false;
    if (block->run < PAYING)
        return gap * (block->run - 1) >= AWAY * block->run_length;
    return gap * (block->touches - 1) >= AWAY * (double)(block->last - block->since);
}

static void touch(struct vgpu_tier *tier, struct vgpu_tier_block *block) {
    const uint32_t gap = tier->now - block->last < LONGEST_GAP ? (uint32_t)(tier->now - block->last) : LONGEST_GAP;
    const bool rest = is_rest(tier, block, gap);
    /* few touches, a long rest, and so on are one history: moves for each run would not pay */
    if (block->touches == 0 || (rest && block->run >= PAYING)) {
        begin_history(tier, block);
        return;
    }
    block->heat += (float)tier->weight;
    block->squares += (float)gap * (float)gap;
    block->touches++;
    block->last = tier->now;
    if (gap > block->lately)
        block->lately = gap;
    if (rest) {
        block->run = 1;
        block->run_length = 0;
    } else if (block->run < PAYING) {
        block->run++;
        block->run_length += gap;
        if (block->run == PAYING && block->touches > PAYING)
            begin_with_run(tier, block);
    }
    if (block->last - block->since > 4 * VGPU_TIER_WINDOW && block->touches > GAPS_ENOUGH)
        forget_old_gaps(block);
}

static void look_at_traffic(struct vgpu_tier *tier) {
    const double touches = tier->hits + tier->misses;
    tier->usual_gap = touches > 0 ? tier->movable * tier->sum / touches : UNKNOWN;
    tier->long_gap = AWAY / 2 * tier->usual_gap;
}

static void end_period(struct vgpu_tier *tier) {
    tier->weight *= GROWTH;
    if (tier->weight >= TOO_HEAVY) { /* powers of two: no rounding */
        tier->weight /= TOO_HEAVY;
        tier->sum /= TOO_HEAVY;
        tier->hits /= TOO_HEAVY;
        tier->misses /= TOO_HEAVY;
        for (uint32_t i = 0; i < tier->used; i++) {
            tier->blocks[i].heat /= (float)TOO_HEAVY;
            tier->blocks[i].birth /= TOO_HEAVY;
        }
    }
    look_at_traffic(tier);
    const double period = 2 * tier->usual_gap;
    tier->period_end = tier->now + (period < PERIOD           ? PERIOD
                                    : period < LONGEST_PERIOD ? (uint64_t)period
                                                              : (uint64_t)LONGEST_PERIOD);
}

void vgpu_tier_launch(struct vgpu_tier *tier, const uint32_t *touched, uint32_t count) {
    uint32_t places[2] = {0, 0};
    tier->now++;
    for (uint32_t i = 0; i < count; i++) {
        struct vgpu_tier_block *block = &tier->blocks[touched[i]];
        if (block->last == tier->now)
            continue;
        touch(tier, block);
        places[block->on_device] += !block->pinned;
    }
    tier->sum += tier->weight;
    tier->hits += tier->weight * places[true];
    tier->misses += tier->weight * places[false];
    tier->recent_hits += places[true] * (uint64_t)RECENT - tier->recent_hits / 8;
    tier->recent_misses += places[false] * (uint64_t)RECENT - tier->recent_misses / 8;
    if (tier->now >= tier->period_end)
        end_period(tier);
}

/* Far more misses than the usual share of touches would explain. */
static bool in_turmoil(const struct vgpu_tier *tier) {
    const double misses = (double)tier->recent_misses / RECENT, touches = misses + (double)tier->recent_hits / RECENT;
    const double all = (tier->hits + tier->misses) / tier->weight;
    if (touches < 1)
        return false;
    const double share = tier->misses / tier->weight / (all + 1), above = misses - touches * share - 2;
    /* Recent touches are a decayed sum. A decayed sum has half the variance of a plain sum with the same mean. */
    return above > 0 && above * above > UNUSUAL * UNUSUAL * touches * share * (1 - share) / 2;
}

/* Launches of a block's history, decayed like its touches; never 0. */
static double span_of(const struct vgpu_tier *tier, const struct vgpu_tier_block *block) {
    return (tier->sum - block->birth) / tier->weight + 1;
}

/* How much more the touches vary than those of a Poisson process: the squared coefficient of variation of the gaps, at
 * least 1. */
static double dispersion_of(const struct vgpu_tier_block *block) {
    const double gaps = (double)(block->last - block->since);
    const double dispersion = gaps > 0 ? (double)block->squares * (block->touches - 1) / (gaps * gaps) - 1 : 1;
    return dispersion > 1 ? dispersion : 1;
}

static void offer(struct pool *pool, double key, uint32_t index) {
    uint32_t at = pool->count;
    if (at == POOL) {
        if (key >= pool->best[POOL - 1].key)
            return;
        at--;
    } else {
        pool->count++;
    }
    for (; at > 0 && key < pool->best[at - 1].key; at--)
        pool->best[at] = pool->best[at - 1];
    pool->best[at].key = key;
    pool->best[at].index = index;
}

/* The blocks from which a plan chooses. */
struct sample {
    uint32_t step, count; /* distance between the entries that are looked at, and their number */
    bool turmoil;
    struct cold colds[POOL];
    struct hot hots[POOL];
    uint32_t cold_count, hot_count;
};

static struct cold cold_of(const struct vgpu_tier *tier, bool turmoil, uint32_t index) {
    const struct vgpu_tier_block *block = &tier->blocks[index];
    struct cold cold = {.index = index,
                        .age = (double)(tier->now - block->last),
                        .rested = turmoil ? rested(tier, block) : away(tier, block)};
    cold.span = cold.rested ? tier->sum / tier->weight + 1 : span_of(tier, block);
    /* count one touch more than was seen: a block with little history must not look cold */
    cold.rate = cold.rested ? 0 : (block->heat / tier->weight + 1) / cold.span;
    cold.variance = (cold.rate + 0.5 / cold.span) / cold.span * (cold.rested ? 1 : dispersion_of(block));
    return cold;
}

static struct hot hot_of(const struct vgpu_tier *tier, bool turmoil, bool fits, const struct cold *coldest,
                         uint32_t index) {
    const struct vgpu_tier_block *block = &tier->blocks[index];
    struct hot hot = {.index = index, .span = span_of(tier, block), .gap = UNKNOWN};
    hot.rate = block->heat / tier->weight / hot.span;
    hot.variance = hot.rate / hot.span * dispersion_of(block);
    if (block->touches > 1)
        hot.gap = (double)(tier->now - block->since) / (double)(block->touches - 1);
    hot.quick = turmoil && block->touches > 1 && (fits || (coldest->rested && 2 * hot.gap < coldest->age));
    return hot;
}

/* The next entry to look at. */
static uint32_t after(const struct vgpu_tier *tier, const struct sample *sample, uint32_t index) {
    const uint64_t next = (uint64_t)index + sample->step;
    return (uint32_t)(next < tier->used ? next : next - tier->used);
}

static void find_cold(const struct vgpu_tier *tier, struct sample *sample) {
    struct pool pool;
    pool.count = 0;
    for (uint32_t i = 0, index = tier->offset; i < sample->count; i++, index = after(tier, sample, index)) {
        const struct vgpu_tier_block *block = &tier->blocks[index];
        if (!block->bytes || !block->on_device || block->pinned)
            continue;
        const struct cold cold = cold_of(tier, sample->turmoil, index);
        offer(&pool, cold.rested ? -cold.age : cold.rate, index);
    }
    sample->cold_count = pool.count;
    for (uint32_t i = 0; i < pool.count; i++)
        sample->colds[i] = cold_of(tier, sample->turmoil, pool.best[i].index);
}

/* The blocks that would gain most per byte if they came up for the coldest block, or into free room. */
static void find_hot(const struct vgpu_tier *tier, struct sample *sample, int64_t room, uint64_t budget) {
    const struct cold *coldest = sample->cold_count ? &sample->colds[0] : NULL;
    struct pool pool;
    pool.count = 0;
    for (uint32_t i = 0, index = tier->offset; i < sample->count; i++, index = after(tier, sample, index)) {
        const struct vgpu_tier_block *block = &tier->blocks[index];
        if (!block->bytes || block->on_device || block->pinned || block->touches == 0 || block->bytes > budget ||
            rested(tier, block))
            continue;
        const bool fits = block->bytes <= (uint64_t)room;
        if (!fits && !coldest)
            continue;
        const struct hot hot = hot_of(tier, sample->turmoil, fits, coldest, index);
        double gain = hot.rate * hot.span;
        if (!fits)
            gain = (hot.rate - coldest->rate) * (hot.span < coldest->span ? hot.span : coldest->span);
        if (hot.quick || gain > 1) /* 1: the cost of its own move */
            offer(&pool, hot.quick ? -QUICK / hot.gap : -gain, index);
    }
    sample->hot_count = pool.count;
    for (uint32_t i = 0; i < pool.count; i++) {
        const uint32_t index = pool.best[i].index;
        sample->hots[i] = hot_of(tier, sample->turmoil, tier->blocks[index].bytes <= (uint64_t)room, coldest, index);
    }
}

/* The cold block that frees up to `need` bytes at the lowest price per useful byte. The price is its move, and its
 * touches over `horizon` launches. Among equals, the coldest. VGPU_TIER_NONE: none. */
static uint32_t cheapest(const struct vgpu_tier *tier, const struct sample *sample, const bool taken[POOL], double need,
                         double horizon) {
    uint32_t found = VGPU_TIER_NONE;
    double least = 0;
    for (uint32_t i = 0; i < sample->cold_count; i++) {
        const double bytes = (double)tier->blocks[sample->colds[i].index].bytes;
        const double price = bytes * (sample->colds[i].rate * horizon + 1) / (bytes < need ? bytes : need);
        if (!taken[i] && (found == VGPU_TIER_NONE || price < least)) {
            found = i;
            least = price;
        }
    }
    return found;
}

/* Marks the blocks that go down to free `need` bytes. Moves no more than `budget`, but at least one block. Returns the
 * freed bytes: less than `need` if the budget or the blocks are not enough. */
static uint64_t choose(const struct vgpu_tier *tier, const struct sample *sample, uint64_t need, uint64_t budget,
                       double horizon, bool taken[POOL]) {
    uint64_t freed = 0;
    while (freed < need) {
        const uint32_t number = cheapest(tier, sample, taken, (double)(need - freed), horizon);
        if (number == VGPU_TIER_NONE)
            return freed;
        const uint64_t bytes = tier->blocks[sample->colds[number].index].bytes;
        if (freed && (freed >= budget || bytes > budget - freed))
            return freed;
        taken[number] = true;
        freed += bytes;
    }
    for (uint32_t i = sample->cold_count; i-- > 0;) { /* drop blocks that a larger block has made unnecessary */
        const uint64_t bytes = tier->blocks[sample->colds[i].index].bytes;
        if (taken[i] && bytes <= freed - need) {
            taken[i] = false;
            freed -= bytes;
        }
    }
    return freed;
}

/* A plan in progress: its savings over the horizon and its cost, in bytes. */
struct draft {
    struct vgpu_tier_plan *plan;
    uint64_t free;                   /* bytes free on the device after all moves */
    double horizon, saved, variance; /* `saved` and `variance` are per launch */
    bool quick;
};

static void come_up(const struct vgpu_tier *tier, struct draft *draft, const struct hot *one) {
    const uint64_t bytes = tier->blocks[one->index].bytes;
    const double size = (double)bytes;
    draft->plan->up[draft->plan->ups++] = one->index;
    draft->plan->bytes += bytes;
    draft->free -= bytes;
    draft->horizon = one->span < draft->horizon ? one->span : draft->horizon;
    draft->saved += size * one->rate;
    draft->variance += size * size * one->variance;
}

static void go_down(const struct vgpu_tier *tier, struct draft *draft, const struct cold *one) {
    const uint64_t bytes = tier->blocks[one->index].bytes;
    const double size = (double)bytes;
    draft->plan->down[draft->plan->downs++] = one->index;
    draft->plan->bytes += bytes;
    draft->free += bytes;
    draft->horizon = one->span < draft->horizon ? one->span : draft->horizon;
    draft->saved -= size * one->rate;
    draft->variance += size * size * one->variance;
}

/* Adds blocks that come up into the rest of the new room, if that pays by itself. */
static void fill_rest(const struct vgpu_tier *tier, const struct sample *sample, uint32_t first, uint64_t budget,
                      struct draft *draft) {
    for (uint32_t i = 0; i < sample->hot_count && draft->plan->ups < VGPU_TIER_MOVES; i++) {
        const struct hot *one = &sample->hots[i];
        const uint64_t bytes = tier->blocks[one->index].bytes;
        if (i == first || bytes > draft->free || bytes > budget - draft->plan->bytes)
            continue;
        if (one->quick == draft->quick && (one->quick || one->rate * draft->horizon > 1))
            come_up(tier, draft, one);
    }
}

/* Plans to bring up hot block number `first`. False: that does not pay, or not within the budget. */
static bool make_room(const struct vgpu_tier *tier, const struct sample *sample, uint32_t first, int64_t room,
                      uint64_t budget, struct vgpu_tier_plan *plan) {
    const struct hot *one = &sample->hots[first];
    const uint64_t bytes = tier->blocks[one->index].bytes, need = bytes > (uint64_t)room ? bytes - (uint64_t)room : 0;
    struct draft draft = {.plan = plan, .free = (uint64_t)room, .horizon = one->span, .quick = one->quick};
    bool taken[POOL] = {false};
    const uint64_t freed = choose(tier, sample, need, budget - bytes, one->span, taken);
    if (freed < need || freed > budget - bytes)
        return false;
    plan->ups = plan->downs = 0;
    plan->bytes = 0;
    for (uint32_t i = 0; i < sample->cold_count; i++) {
        const struct cold *cold = &sample->colds[i];
        if (taken[i] && one->quick && !(cold->rested && 2 * one->gap < cold->age))
            return false;
        if (taken[i])
            go_down(tier, &draft, cold);
    }
    come_up(tier, &draft, one);
    if (plan->downs)
        fill_rest(tier, sample, first, budget, &draft);
    const double gain = draft.saved * draft.horizon - (double)plan->bytes;
    return one->quick ||
           (gain >= 0 && gain * gain >= CERTAINTY * CERTAINTY * draft.variance * draft.horizon * draft.horizon);
}

static bool give_way(const struct vgpu_tier *tier, const struct sample *sample, int64_t room, uint64_t budget,
                     struct vgpu_tier_plan *plan) {
    bool taken[POOL] = {false};
    plan->ups = plan->downs = 0;
    plan->bytes = choose(tier, sample, -(uint64_t)room, budget, VGPU_TIER_WINDOW, taken);
    for (uint32_t i = 0; i < sample->cold_count; i++)
        if (taken[i])
            plan->down[plan->downs++] = sample->colds[i].index;
    return plan->downs > 0;
}

/* Since the last search without result, probably nothing has changed. */
static bool is_calm(const struct vgpu_tier *tier, int64_t room, uint64_t budget) {
    return tier->now < tier->look_again && room == tier->room && budget <= tier->budget && !in_turmoil(tier);
}

static bool plan_of(struct vgpu_tier *tier, struct sample *sample, int64_t room, uint64_t budget,
                    struct vgpu_tier_plan *plan) {
    sample->turmoil = in_turmoil(tier);
    tier->offset = (tier->offset + 1) % tier->used;
    sample->step = tier->used > VGPU_TIER_LOOKED_AT ? tier->used / VGPU_TIER_LOOKED_AT : 1;
    /* vary the step, so that the same blocks do not always meet */
    sample->step -= tier->offset % ((sample->step + 1) / 2);
    sample->count = tier->used > VGPU_TIER_LOOKED_AT ? VGPU_TIER_LOOKED_AT : tier->used;
    find_cold(tier, sample);
    if (room < 0)
        return give_way(tier, sample, room, budget, plan);
    find_hot(tier, sample, room, budget);
    for (uint32_t i = 0; i < sample->hot_count && i < TRIES; i++)
        if (make_room(tier, sample, i, room, budget, plan))
            return true;
    tier->look_again = tier->now + CALM;
    tier->room = room;
    tier->budget = budget;
    return false;
}

bool vgpu_tier_plan(struct vgpu_tier *tier, int64_t room, uint64_t budget, struct vgpu_tier_plan *plan) {
    if (tier->movable == 0 || (room >= 0 && is_calm(tier, room, budget)))
        return false;
    look_at_traffic(tier);
    struct sample *sample = malloc(sizeof *sample); /* too large for a thread's stack */
    const bool found = sample && plan_of(tier, sample, room, budget, plan);
    free(sample);
    return found;
}
