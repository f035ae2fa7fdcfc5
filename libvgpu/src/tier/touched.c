/* Notes which blocks launches touch. */
#define _GNU_SOURCE
#include "tier/touched.h"

#include <string.h>

#include "ledger/charge.h"
#include "tier/parameters.h"
#include "tier/tier.h"

#define MOST 256u     /* most blocks of one launch of a graph; further blocks count as touched by another launch */
#define NO_BLOCKS 64u /* launches until the next check whether there are movable blocks */

/* How many launches pass without a note: random, from none to twice the mean, so that all parts of a repeating pattern
 * are seen. */
static uint32_t distance(struct vgpu_passage *mine) {
    if (mine->noted_of <= 1)
        return 0;
    mine->random = mine->random * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)mine->random * (2 * mine->noted_of - 1) >> 32);
}

static inline void look_at(struct vgpu_noting *noting, const void *word) {
    uint64_t address;
    memcpy(&address, word, sizeof address);
    const uint32_t number = vgpu_tier_find(address);
    if (number == VGPU_TIER_NONE || noting->count == VGPU_NOTED_BLOCKS)
        return;
    noting->at[noting->count] = address;
    noting->blocks[noting->count++] = number;
}

static void look_at_list(struct vgpu_noting *noting, CUfunction function, void **list) {
    struct vgpu_parameters parameters;
    vgpu_parameters_of(function, &parameters);
    for (uint32_t i = 0; i < parameters.count; i++) {
        const char *storage = list[parameters.words[i].parameter];
        if (storage)
            look_at(noting, storage + parameters.words[i].offset);
    }
}

/* All parameters in one buffer, which cuLaunchKernel also accepts. */
static void look_at_buffer(struct vgpu_noting *noting, void **extra) {
    const char *buffer = NULL;
    size_t size = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[1])
            size = *(const size_t *)extra[1];
        else
            return; /* the driver will refuse the call */
    }
    if (!buffer)
        return;
    for (size_t at = 0; at + 8 <= size && at < 8 * VGPU_PARAMETER_WORDS; at += 8)
        look_at(noting, buffer + at);
}

void vgpu_note_parameters(struct vgpu_noting *noting, CUfunction function, void **parameters, void **extra) {
    noting->count = 0;
    if (parameters)
        look_at_list(noting, function, parameters);
    else if (extra)
        look_at_buffer(noting, extra);
}

void vgpu_touched_kernel_slowly(struct vgpu_passage *mine, CUfunction function, void **parameters, void **extra) {
    struct vgpu_noting noting;
    vgpu_own_tables(); /* a forked child has none of its parent's blocks */
    if (!mine)
        mine = vgpu_passage_take();
    if (!mine)
        return;
    if (!vgpu_tier_any() || vgpu_tier_mode() != VGPU_TIER_MOVABLE) {
        mine->until_noted = NO_BLOCKS;
        return;
    }
    mine->until_noted = distance(mine);
    vgpu_note_parameters(&noting, function, parameters, extra);
    if (!noting.count)
        return;
    if (mine->noted + 1 + noting.count > sizeof mine->touches / sizeof *mine->touches) {
        vgpu_touched_tell(mine);
        mine->noted = 0; /* another thread is making or freeing blocks: these notes are lost */
    }
    mine->touches[mine->noted++] = noting.count;
    memcpy(&mine->touches[mine->noted], noting.blocks, noting.count * sizeof *noting.blocks);
    mine->noted += noting.count;
}

static const struct vgpu_tier_record *known(uint32_t number) {
    const struct vgpu_tier_record *block = vgpu_tier_record(number);
    return block->bytes && block->entry != VGPU_TIER_NONE ? block : NULL;
}

/* Gives one card the launch with the card's own blocks. Returns whether the launch also touches blocks of other
 * cards. */
static bool tell_card(unsigned card, const uint32_t *numbers, uint32_t count) {
    uint32_t entries[MOST], found = 0;
    bool others = false;
    for (uint32_t i = 0; i < count; i++) {
        const struct vgpu_tier_record *block = known(numbers[i]);
        if (block && block->card == card)
            entries[found++] = block->entry;
        others |= block && block->card != card;
    }
    struct vgpu_tier_card *tier = vgpu_tier_card(card);
    if (found && tier) {
        vgpu_spin_lock(&tier->lock);
        vgpu_tier_launch(&tier->policy, entries, found);
        vgpu_spin_unlock(&tier->lock);
    }
    return others;
}

static void tell_launch(const uint32_t *numbers, uint32_t count) {
    const struct vgpu_tier_record *first = NULL;
    for (uint32_t i = 0; i < count && !first; i++)
        first = known(numbers[i]);
    if (!first || !tell_card(first->card, numbers, count))
        return;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        if (card != first->card)
            tell_card(card, numbers, count);
}

void vgpu_touched_tell(struct vgpu_passage *mine) {
    if (!mine->noted || !vgpu_tier_try())
        return;
    for (uint32_t at = 0; at < mine->noted; at += 1 + mine->touches[at])
        tell_launch(&mine->touches[at + 1], mine->touches[at]);
    mine->noted = 0;
    vgpu_tier_unlock();
}

void vgpu_touched_at(const CUdeviceptr *addresses, uint32_t count) {
    if (!vgpu_tier_try())
        return;
    for (uint32_t i = 0; i < count;) {
        uint32_t numbers[MOST], found = 0;
        for (; i < count && found < MOST; i++) {
            const uint32_t number = vgpu_tier_find(addresses[i]);
            if (number != VGPU_TIER_NONE)
                numbers[found++] = number;
        }
        tell_launch(numbers, found);
    }
    vgpu_tier_unlock();
}
