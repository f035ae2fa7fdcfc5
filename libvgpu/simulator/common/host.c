/* Host memory of the driver, pinned or made for a card. Each process counts its own, so that it disappears with the
 * process and no process waits for another. */
#include <stddef.h>

#include "common/state.h"

void sim_host_note(struct sim_share_of_card *share, uint64_t bytes) {
    uint64_t now = atomic_fetch_add_explicit(&share->host, bytes, memory_order_relaxed) + bytes;
    uint64_t peak = atomic_load_explicit(&share->host_peak, memory_order_relaxed);
    while (peak < now && !atomic_compare_exchange_weak_explicit(&share->host_peak, &peak, now, memory_order_relaxed,
                                                                memory_order_relaxed))
        ;
}

void sim_host_add(struct sim *sim, int card, uint64_t bytes) {
    if (sim_self_valid(sim))
        sim_host_note(&sim->self->cards[card], bytes);
}

void sim_host_sub(struct sim *sim, int card, uint64_t bytes) {
    if (sim_self_valid(sim))
        atomic_fetch_sub_explicit(&sim->self->cards[card].host, bytes, memory_order_relaxed);
}

bool sim_host_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes) {
    struct sim_process *peer = sim_peer(sim, slot);
    if (!peer || !sim_self_valid(sim) ||
        atomic_load(&sim->state->slots[slot].owner) != ((uint64_t)generation << 2 | SIM_LIVE))
        return false;
    sim_host_note(&peer->cards[card], bytes);
    sim_host_sub(sim, card, bytes);
    return true;
}

uint64_t sim_host(struct sim *sim, int card) {
    uint64_t sum = 0;
    for (uint32_t slot = 0; slot < atomic_load(&sim->state->slots_used); slot++) {
        struct sim_process *process = sim_alive(sim, slot) ? sim_peer(sim, slot) : NULL;
        sum += process ? atomic_load_explicit(&process->cards[card].host, memory_order_relaxed) : 0;
    }
    return sum;
}

int sim_nodes(const struct sim *sim) {
    return sim->state->card_count > 1 ? 2 : 1;
}

int sim_node_of(const struct sim *sim, int card) {
    int cards = (int)sim->state->card_count;
    return cards > 1 && card >= (cards + 1) / 2;
}
