#include "ways.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define NOBODY UINT32_MAX

struct tenant {
    int64_t room; /* free places on the device; below 0: too many blocks are there */
    struct vgpu_tier tier;
    struct vgpu_tier_block entries[BLOCKS];
    uint32_t block_of[BLOCKS]; /* by the tier's index */
};

struct block {
    bool there, on_device;
    uint32_t tenant, index; /* the latter in the tier */
    uint64_t last;          /* touch, MANAGED */
    uint64_t ahead;         /* touches in the rest of the phase, HINDSIGHT */
};

struct game {
    const struct trace *trace;
    enum way way;
    struct rules rules;
    struct result *result;
    struct tenant tenants[TENANTS];
    struct block blocks[BLOCKS];
    uint64_t touches;
};

static void move(struct game *game, uint32_t number, bool to_device) {
    struct block *block = &game->blocks[number];
    struct tenant *tenant = &game->tenants[block->tenant];
    if (block->on_device == to_device)
        abort();
    block->on_device = to_device;
    tenant->room += to_device ? -1 : 1;
    game->result->bus++;
    game->result->moves++;
    if (game->way == POLICY)
        vgpu_tier_moved(&tenant->tier, block->index, to_device);
}

/* What a way would rather lose, or keep least. */
static uint64_t worth(const struct game *game, uint32_t number) {
    if (game->way == MANAGED)
        return game->blocks[number].last;
    return game->way == HINDSIGHT ? game->blocks[number].ahead : number;
}

/* The tenant's block of least or most worth on the device or in host memory; NOBODY. */
static uint32_t extreme(const struct game *game, uint32_t tenant, bool on_device, bool most) {
    uint32_t found = NOBODY;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const struct block *block = &game->blocks[i];
        if (!block->there || block->tenant != tenant || block->on_device != on_device)
            continue;
        if (found == NOBODY || (most ? worth(game, i) > worth(game, found) : worth(game, i) < worth(game, found)))
            found = i;
    }
    return found;
}

static void follow(struct game *game, uint32_t number, struct vgpu_tier_plan *plan) {
    struct tenant *tenant = &game->tenants[number];
    for (uint32_t i = 0; i < plan->downs; i++)
        move(game, tenant->block_of[plan->down[i]], false);
    for (uint32_t i = 0; i < plan->ups; i++)
        move(game, tenant->block_of[plan->up[i]], true);
    if (plan->ups && tenant->room < 0)
        abort();
}

static void give_way(struct game *game, uint32_t number) {
    struct tenant *tenant = &game->tenants[number];
    while (tenant->room < 0) {
        if (game->way == POLICY) {
            struct vgpu_tier_plan plan;
            if (!vgpu_tier_plan(&tenant->tier, tenant->room, UINT64_MAX, &plan))
                abort();
            follow(game, number, &plan);
        } else {
            move(game, extreme(game, number, true, false), false);
        }
    }
}

static void look_ahead(struct game *game, uint32_t number, const struct op *from) {
    for (uint32_t i = 0; i < BLOCKS; i++)
        if (game->blocks[i].tenant == number)
            game->blocks[i].ahead = 0;
    for (const struct op *op = from; op < game->trace->ops + game->trace->count; op++) {
        if (op->tenant != number)
            continue;
        if (op->kind == PHASE)
            return;
        for (uint32_t i = 0; op->kind == LAUNCH && i < op->count; i++)
            game->blocks[game->trace->touched[op->first + i]].ahead++;
    }
}

static void decide(struct game *game, uint32_t number) {
    struct tenant *tenant = &game->tenants[number];
    for (;;) {
        const uint32_t up = extreme(game, number, false, true);
        if (up == NOBODY)
            return;
        if (tenant->room <= 0) {
            const uint32_t down = extreme(game, number, true, false);
            if (down == NOBODY || game->blocks[up].ahead <= game->blocks[down].ahead + 2)
                return;
            move(game, down, false);
        } else if (game->blocks[up].ahead <= 1) {
            return;
        }
        move(game, up, true);
    }
}

static void add(struct game *game, uint32_t number, uint32_t which) {
    struct tenant *tenant = &game->tenants[number];
    struct block *block = &game->blocks[which];
    *block = (struct block){.there = true, .tenant = number, .on_device = tenant->room > 0, .last = game->touches};
    tenant->room -= block->on_device;
    if (game->way != POLICY)
        return;
    block->index = vgpu_tier_add(&tenant->tier, 1, block->on_device, false);
    tenant->block_of[block->index] = which;
}

static void take_away(struct game *game, uint32_t number, uint32_t which) {
    struct tenant *tenant = &game->tenants[number];
    tenant->room += game->blocks[which].on_device;
    game->blocks[which].there = false;
    if (game->way == POLICY)
        vgpu_tier_remove(&tenant->tier, game->blocks[which].index);
}

static void know_better(struct game *game, uint32_t number, const struct op *from) {
    if (game->way != HINDSIGHT)
        return;
    look_ahead(game, number, from);
    decide(game, number);
}

static void launch(struct game *game, const struct op *op) {
    struct tenant *tenant = &game->tenants[op->tenant];
    uint32_t indices[MOST_TOUCHED];
    for (uint32_t i = 0; i < op->count; i++) {
        const uint32_t which = game->trace->touched[op->first + i];
        struct block *block = &game->blocks[which];
        block->last = ++game->touches;
        indices[i] = block->index;
        if (block->on_device)
            continue;
        if (game->way == MANAGED) {
            if (tenant->room <= 0)
                move(game, extreme(game, op->tenant, true, false), false);
            move(game, which, true);
        } else {
            game->result->bus++;
        }
    }
    if (game->way != POLICY)
        return;
    vgpu_tier_launch(&tenant->tier, indices, op->count);
    if (tenant->tier.now % game->rules.every)
        return;
    struct vgpu_tier_plan plan;
    for (uint64_t left = game->rules.budget; vgpu_tier_plan(&tenant->tier, tenant->room, left, &plan);
         left -= plan.bytes)
        follow(game, op->tenant, &plan);
}

static void step(struct game *game, const struct op *op) {
    struct tenant *tenant = &game->tenants[op->tenant];
    int64_t held = 0;
    switch ((enum kind)op->kind) {
    case LAUNCH: launch(game, op); break;
    case ADD: add(game, op->tenant, op->count); break;
    case REMOVE:
        take_away(game, op->tenant, op->count);
        know_better(game, op->tenant, op + 1);
        break;
    case CAPACITY:
        for (uint32_t i = 0; i < BLOCKS; i++)
            held += game->blocks[i].there && game->blocks[i].tenant == op->tenant && game->blocks[i].on_device;
        tenant->room = op->count - held;
        if (game->way == HINDSIGHT)
            look_ahead(game, op->tenant, op + 1);
        give_way(game, op->tenant);
        break;
    case PHASE: know_better(game, op->tenant, op + 1); break;
    }
}

void play(const struct trace *trace, enum way way, struct rules rules, struct result *result) {
    struct game *game = calloc(1, sizeof *game);
    if (!game)
        abort();
    *game = (struct game){.trace = trace, .way = way, .rules = rules, .result = result};
    memset(result, 0, sizeof *result);
    for (uint32_t i = 0; i < TENANTS; i++)
        vgpu_tier_begin(&game->tenants[i].tier, game->tenants[i].entries, BLOCKS);
    for (uint32_t i = 0, launches = 0; i < trace->count; i++) {
        step(game, &trace->ops[i]);
        if (trace->ops[i].kind == LAUNCH)
            result->points[(uint64_t)launches++ * POINTS / trace->launches] = result->bus;
    }
    free(game);
}
