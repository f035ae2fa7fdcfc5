/* Bytes in use. A process's own file says what it holds; a card's `used` is the sum of the files, kept up to date under the card's lock and
 * counted anew from the files of live processes whenever that could matter: a request does not fit, somebody asks, a holder died. */
#include <errno.h>

#include "common/state.h"

/* Under the card's memory lock. */
static uint64_t recount(struct sim *sim, int card)
{
    struct sim_state *state = sim->state;
    uint64_t sum = 0;
    uint32_t slots = atomic_load(&state->slots_used);
    for (uint32_t i = 0; i < slots; i++) {
        bool self = sim->self && i == sim->slot;
        if ((atomic_load(&state->slots[i].owner) & 3) != SIM_LIVE || (!self && !sim_alive(sim, i)))
            continue;
        struct sim_process *process = self ? sim->self : sim_peer(sim, i);
        if (process)
            sum += atomic_load_explicit(&process->cards[card].used, memory_order_relaxed);
    }
    atomic_store_explicit(&state->cards[card].used, sum, memory_order_relaxed);
    return sum;
}

static void raise(_Atomic uint64_t *peak, uint64_t value)
{
    if (value > atomic_load_explicit(peak, memory_order_relaxed))
        atomic_store_explicit(peak, value, memory_order_relaxed);
}

int sim_charge(struct sim *sim, int index, uint64_t bytes)
{
    struct sim_card *card = &sim->state->cards[index];
    uint64_t size = sim_usable(sim->profile);
    if (bytes > size)
        return -ENOMEM;
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    uint64_t used = atomic_load_explicit(&card->used, memory_order_relaxed);
    if (used + bytes > size)
        used = recount(sim, index);
    else if (used + bytes > atomic_load_explicit(&card->peak, memory_order_relaxed) &&
             atomic_load_explicit(&sim->state->slots_used, memory_order_relaxed) > 1)
        used = recount(sim, index); /* the peak must not contain what the dead held, not even for a moment */
    int result = !sim_self_valid(sim) ? -EIO : used + bytes > size ? -ENOMEM : 0;
    if (!result) {
        uint64_t own = atomic_load_explicit(&sim->self->cards[index].used, memory_order_relaxed) + bytes;
        atomic_store_explicit(&sim->self->cards[index].used, own, memory_order_relaxed);
        atomic_store_explicit(&card->used, used + bytes, memory_order_relaxed);
        raise(&sim->self->cards[index].peak, own);
        raise(&card->peak, used + bytes);
    }
    sim_release(&card->memory_lock);
    return result;
}

void sim_uncharge(struct sim *sim, int index, uint64_t bytes)
{
    struct sim_card *card = &sim->state->cards[index];
    if (!sim_self_valid(sim))
        return;
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    uint64_t own = atomic_load_explicit(&sim->self->cards[index].used, memory_order_relaxed);
    atomic_store_explicit(&sim->self->cards[index].used, own - bytes, memory_order_relaxed);
    atomic_store_explicit(&card->used, atomic_load_explicit(&card->used, memory_order_relaxed) - bytes, memory_order_relaxed);
    sim_release(&card->memory_lock);
}

bool sim_transfer(struct sim *sim, int index, uint32_t slot, uint32_t generation, uint64_t bytes)
{
    struct sim_card *card = &sim->state->cards[index];
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    struct sim_process *peer = sim_peer(sim, slot);
    bool there = peer && sim_self_valid(sim) && atomic_load(&sim->state->slots[slot].owner) == ((uint64_t)generation << 2 | SIM_LIVE);
    if (there) {
        uint64_t theirs = atomic_load_explicit(&peer->cards[index].used, memory_order_relaxed) + bytes;
        uint64_t own = atomic_load_explicit(&sim->self->cards[index].used, memory_order_relaxed) - bytes;
        atomic_store_explicit(&sim->self->cards[index].used, own, memory_order_relaxed);
        atomic_store_explicit(&peer->cards[index].used, theirs, memory_order_relaxed);
        raise(&peer->cards[index].peak, theirs);
    }
    sim_release(&card->memory_lock);
    return there;
}

uint64_t sim_used(struct sim *sim, int index)
{
    struct sim_card *card = &sim->state->cards[index];
    sim_acquire(sim, &card->memory_lock);
    uint64_t used = recount(sim, index);
    sim_release(&card->memory_lock);
    return used;
}
