/* Bytes in use. Each process's own file says what the process holds. A card's `used` is the sum of the files, kept up
 * to date under the card's lock. It is recounted from the files of live processes whenever that may matter: a request
 * does not fit, a process asks, a holder died. */
#include <errno.h>
#include <stddef.h>

#include "common/state.h"

/* Under the card's memory lock. */
static uint64_t recount(struct sim *sim, int card) {
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

static void raise(_Atomic uint64_t *peak, uint64_t value) {
    if (value > atomic_load_explicit(peak, memory_order_relaxed))
        atomic_store_explicit(peak, value, memory_order_relaxed);
}

int sim_charge(struct sim *sim, int index, uint64_t bytes) {
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
        used = recount(sim, index); /* the peak must never contain what dead processes held, not even for a moment */
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

void sim_uncharge(struct sim *sim, int index, uint64_t bytes) {
    struct sim_card *card = &sim->state->cards[index];
    if (!sim_self_valid(sim))
        return;
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    uint64_t own = atomic_load_explicit(&sim->self->cards[index].used, memory_order_relaxed);
    atomic_store_explicit(&sim->self->cards[index].used, own - bytes, memory_order_relaxed);
    atomic_store_explicit(&card->used, atomic_load_explicit(&card->used, memory_order_relaxed) - bytes,
                          memory_order_relaxed);
    sim_release(&card->memory_lock);
}

bool sim_transfer(struct sim *sim, int index, uint32_t slot, uint32_t generation, uint64_t bytes) {
    struct sim_card *card = &sim->state->cards[index];
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    struct sim_process *peer = sim_peer(sim, slot);
    bool there = peer && sim_self_valid(sim) &&
                 atomic_load(&sim->state->slots[slot].owner) == ((uint64_t)generation << 2 | SIM_LIVE);
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

uint64_t sim_used(struct sim *sim, int index) {
    struct sim_card *card = &sim->state->cards[index];
    sim_acquire(sim, &card->memory_lock);
    uint64_t used = recount(sim, index);
    sim_release(&card->memory_lock);
    return used;
}

/* Managed memory that comes and goes. A process that needs room takes it from the process whose oldest managed memory
 * was touched longest ago. That process notices at its next touch. */
static uint64_t read_of(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void write_to(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* Under the card's memory lock: turns `bytes` of a process's managed memory into host memory. */
static void leave(struct sim_card *card, struct sim_share_of_card *share, uint64_t bytes) {
    write_to(&share->managed, read_of(&share->managed) - bytes);
    write_to(&share->used, read_of(&share->used) - bytes);
    write_to(&card->used, read_of(&card->used) - bytes);
    sim_host_note(share, bytes);
}

void sim_managed_came(struct sim *sim, int index, uint64_t bytes) {
    if (!sim_self_valid(sim))
        return;
    if (sim_acquire(sim, &sim->state->cards[index].memory_lock))
        recount(sim, index);
    write_to(&sim->self->cards[index].managed, read_of(&sim->self->cards[index].managed) + bytes);
    sim_release(&sim->state->cards[index].memory_lock);
    sim_host_sub(sim, index, bytes);
}

void sim_managed_go(struct sim *sim, int index, uint64_t bytes, bool lost) {
    struct sim_card *card = &sim->state->cards[index];
    if (!sim_self_valid(sim))
        return;
    struct sim_share_of_card *own = &sim->self->cards[index];
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    uint64_t taken = read_of(&own->taken), here = read_of(&own->managed), gone;
    if (lost)
        gone = taken < bytes ? taken : bytes;
    else
        gone = here < bytes ? bytes - here : 0;
    write_to(&own->taken, taken - gone);
    leave(card, own, bytes - gone);
    sim_release(&card->memory_lock);
}

uint64_t sim_managed_take(struct sim *sim, int index, uint64_t bytes, uint64_t before_ns) {
    struct sim_card *card = &sim->state->cards[index];
    struct sim_share_of_card *victim = NULL;
    if (sim_acquire(sim, &card->memory_lock))
        recount(sim, index);
    for (uint32_t slot = 0; slot < atomic_load(&sim->state->slots_used); slot++) {
        struct sim_process *peer =
            (atomic_load(&sim->state->slots[slot].owner) & 3) == SIM_LIVE ? sim_peer(sim, slot) : NULL;
        struct sim_share_of_card *share = peer && peer != sim->self ? &peer->cards[index] : NULL;
        if (!share || !read_of(&share->managed) || read_of(&share->oldest_ns) >= before_ns || !sim_alive(sim, slot))
            continue;
        victim = share;
        before_ns = read_of(&victim->oldest_ns);
    }
    uint64_t most = victim ? read_of(&victim->managed) : 0;
    bytes = bytes < most ? bytes : most;
    if (bytes) {
        write_to(&victim->taken, read_of(&victim->taken) + bytes);
        leave(card, victim, bytes);
    }
    sim_release(&card->memory_lock);
    return bytes;
}
