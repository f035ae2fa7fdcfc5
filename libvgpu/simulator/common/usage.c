/* Utilisation as NVML samples it. A card or a process notes its busy time when it first works in a sample period. The
 * busy time at the beginning of a period is the note of that period. If there is none, nothing changed, and the next
 * later note is valid. */
#include <stddef.h>

#include "common/state.h"

#define SECOND_TICKS 6u

void sim_usage_note(struct sim_usage *usage, uint64_t now, uint64_t busy) {
    uint64_t tick = now / SIM_TICK_NS;
    if (atomic_load_explicit(&usage->tick[tick % SIM_TICKS], memory_order_relaxed) == tick)
        return;
    atomic_store_explicit(&usage->busy_ns[tick % SIM_TICKS], busy, memory_order_relaxed);
    atomic_store_explicit(&usage->tick[tick % SIM_TICKS], tick, memory_order_release);
}

static uint64_t busy_at(const struct sim_usage *usage, uint64_t tick, uint64_t busy) {
    uint64_t found = SIM_NEVER;
    for (uint32_t i = 0; i < SIM_TICKS; i++) {
        uint64_t noted = atomic_load_explicit(&usage->tick[i], memory_order_acquire);
        if (noted >= tick && noted < found) {
            found = noted;
            busy = atomic_load_explicit(&usage->busy_ns[i], memory_order_relaxed);
        }
    }
    return busy;
}

uint32_t sim_share(struct sim *sim, int index, int slot, uint64_t seen_ns, uint64_t *sampled_ns, bool *some) {
    struct sim_card *card = &sim->state->cards[index];
    struct sim_process *process = slot >= 0 ? sim_peer(sim, (uint32_t)slot) : NULL;
    *some = false;
    if (slot >= 0 && !process)
        return 0;
    uint64_t now = sim_time_begin(sim, index);
    const struct sim_usage *usage = process ? &process->cards[index].usage : &card->usage;
    uint64_t busy = atomic_load(process ? &process->cards[index].busy_ns : &card->busy_ns);
    uint64_t last = now / SIM_TICK_NS, first = last > SECOND_TICKS ? last - SECOND_TICKS : 0;
    first = seen_ns / SIM_TICK_NS > first ? seen_ns / SIM_TICK_NS : first;
    uint64_t ran = first < last ? busy_at(usage, last, busy) - busy_at(usage, first, busy) : 0;
    sim_release(&card->time_lock);
    *sampled_ns = last * SIM_TICK_NS;
    *some = ran > 0;
    return first < last ? (uint32_t)(ran * 1000000u / ((last - first) * SIM_TICK_NS)) : 0;
}
