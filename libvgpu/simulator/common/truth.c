/* The public view of the state (vgpu/simulator.h). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/state.h"

int vgpu_sim_cards(const char *dir, struct vgpu_sim_card *out, int capacity) {
    struct sim sim;
    int error = sim_open(&sim, dir);
    if (error)
        return error;
    int count = (int)sim.state->card_count < capacity ? (int)sim.state->card_count : capacity;
    for (int i = 0; i < count; i++) {
        struct sim_card *card = &sim.state->cards[i];
        memset(&out[i], 0, sizeof out[i]);
        memcpy(out[i].uuid, card->uuid, sizeof card->uuid);
        snprintf(out[i].model, sizeof out[i].model, "%s", sim.profile->name);
        out[i].memory = sim_usable(sim.profile);
        out[i].reserved = sim.profile->reserved;
        out[i].context_bytes = sim.profile->context_bytes;
        out[i].module_bytes = sim.profile->module_bytes;
        out[i].used = sim_used(&sim, i);
        out[i].peak = atomic_load(&card->peak);
        sim_advance(&sim, i);
        out[i].busy_ns = atomic_load(&card->busy_ns);
        out[i].switches = atomic_load(&card->switches);
        for (uint32_t slot = 0; slot < atomic_load(&sim.state->slots_used); slot++) {
            struct sim_process *process = sim_alive(&sim, slot) ? sim_peer(&sim, slot) : NULL;
            if (process && (atomic_load(&process->cards[i].contexts) || atomic_load(&process->cards[i].used)))
                out[i].processes++;
        }
        out[i].host = sim_host(&sim, i);
    }
    sim_close(&sim);
    return count;
}

int vgpu_sim_processes(const char *dir, struct vgpu_sim_process *out, int capacity) {
    struct sim sim;
    int count = 0, error = sim_open(&sim, dir);
    if (error)
        return error;
    for (uint32_t i = 0; i < sim.state->card_count; i++)
        sim_advance(&sim, (int)i);
    for (uint32_t slot = 0; slot < atomic_load(&sim.state->slots_used) && count < capacity; slot++) {
        struct sim_process *process = sim_peer(&sim, slot);
        if ((atomic_load(&sim.state->slots[slot].owner) & 3) == SIM_UNUSED || !process)
            continue;
        struct vgpu_sim_process *view = &out[count++];
        memset(view, 0, sizeof *view);
        view->alive = sim_alive(&sim, slot);
        view->pid = process->pid;
        view->start_time = process->start_time;
        for (int card = 0; card < SIM_CARDS; card++) {
            view->used[card] = view->alive ? atomic_load(&process->cards[card].used) : 0;
            view->peak[card] = atomic_load(&process->cards[card].peak);
            view->busy_ns[card] = atomic_load(&process->cards[card].busy_ns);
            view->waited_ns[card] = card < (int)sim.state->card_count ? sim_waited(&sim, card, slot, sim_now()) : 0;
            view->launches[card] = atomic_load(&process->cards[card].launches);
            view->host[card] = view->alive ? atomic_load(&process->cards[card].host) : 0;
            view->host_peak[card] = atomic_load(&process->cards[card].host_peak);
            view->faults[card] = atomic_load(&process->cards[card].faults);
        }
    }
    sim_close(&sim);
    return count;
}

int vgpu_sim_inject_xid(const char *dir, int card, uint32_t xid) {
    struct sim sim;
    int error = sim_open(&sim, dir);
    if (error)
        return error;
    if (card < 0 || card >= (int)sim.state->card_count) {
        sim_close(&sim);
        return -ENODEV;
    }
    atomic_store(&sim.state->cards[card].xid, xid);
    if (xid)
        atomic_fetch_add(&sim.state->cards[card].xid_count, 1);
    sim_close(&sim);
    return 0;
}
