/* Errors on demand: the n-th call of an entry point returns a given code (vgpu_sim_inject_error). Calls of all
 * processes count together. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/state.h"

int sim_fault(struct sim *sim, const char *entry) {
    for (int i = 0; i < SIM_FAULTS; i++) {
        struct sim_fault *fault = &sim->state->faults[i];
        if (atomic_load(&fault->remaining) <= 0 || strcmp(fault->entry, entry) != 0)
            continue;
        if (atomic_fetch_sub(&fault->remaining, 1) == 1) {
            atomic_fetch_sub(&sim->state->faults_armed, 1);
            return fault->code;
        }
    }
    return 0;
}

static void disarm(struct sim_state *state, struct sim_fault *fault) {
    if (atomic_exchange(&fault->remaining, 0) > 0)
        atomic_fetch_sub(&state->faults_armed, 1);
}

static int arm(struct sim_state *state, const char *entry, uint64_t nth, int code) {
    struct sim_fault *unused = NULL;
    for (int i = 0; i < SIM_FAULTS; i++) {
        struct sim_fault *fault = &state->faults[i];
        if (!*entry || strcmp(fault->entry, entry) == 0)
            disarm(state, fault);
        if (!unused && atomic_load(&fault->remaining) <= 0)
            unused = fault;
    }
    if (!nth || !*entry)
        return 0;
    if (!unused)
        return -ENOSPC;
    memset(unused->entry, 0, sizeof unused->entry);
    memcpy(unused->entry, entry, strlen(entry));
    unused->code = code;
    atomic_store(&unused->remaining, (int64_t)nth);
    atomic_fetch_add(&state->faults_armed, 1);
    return 0;
}

int vgpu_sim_inject_error(const char *dir, const char *entry, uint64_t nth, int code) {
    struct sim sim;
    if (strlen(entry) >= sizeof sim.state->faults[0].entry || nth > INT64_MAX || (nth && code <= 0))
        return -EINVAL;
    int error = sim_open(&sim, dir);
    if (error)
        return error;
    sim_acquire(&sim, &sim.state->registry_lock);
    error = arm(sim.state, entry, nth, code);
    sim_release(&sim.state->registry_lock);
    sim_close(&sim);
    return error;
}
