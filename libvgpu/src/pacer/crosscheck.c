/* Asks NVML which processes use a card, and how much. */
#define _GNU_SOURCE
#include "pacer/crosscheck.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "ledger/ledger.h"
#include "loader/driver.h"
#include "region/slots.h"

#define SAMPLES 128u

static bool handle_of(unsigned card, nvmlDevice_t *handle) {
    static atomic_int state; /* 1: NVML works, 2: it does not */
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits || !DRIVER(nvmlInit_v2) || atomic_load(&state) == 2)
        return false;
    if (!atomic_load(&state))
        atomic_store(&state, DRIVER(nvmlInit_v2)() == NVML_SUCCESS ? 1 : 2);
    const char *uuid = limits->cards[card].uuid;
    if (uuid[0])
        return DRIVER(nvmlDeviceGetHandleByUUID) && DRIVER(nvmlDeviceGetHandleByUUID)(uuid, handle) == NVML_SUCCESS;
    return DRIVER(nvmlDeviceGetHandleByIndex_v2) && DRIVER(nvmlDeviceGetHandleByIndex_v2)(card, handle) == NVML_SUCCESS;
}

static bool is_ours(unsigned pid) {
    const struct vgpu_usage_file *usage = vgpu_mapping()->usage;
    uint32_t high = atomic_load_explicit(&usage->slots_high, memory_order_relaxed);
    for (uint32_t slot = 0; slot < high && slot < VGPU_SLOTS; slot++)
        if (vgpu_slot_state(usage->heads[slot].owner) == VGPU_SLOT_LIVE && (unsigned)usage->heads[slot].pid == pid)
            return true;
    return false;
}

static unsigned used_by_all(nvmlDevice_t handle) {
    nvmlUtilization_t rates;
    __typeof__(&nvmlDeviceGetUtilizationRates) ask = DRIVER(nvmlDeviceGetUtilizationRates);
    return ask && ask(handle, &rates) == NVML_SUCCESS ? rates.gpu : 0;
}

static bool compare(nvmlProcessUtilizationSample_t *samples, unsigned card, struct vgpu_seen *seen) {
    unsigned count = SAMPLES, per_process = 1, own_samples = 0;
    nvmlDevice_t handle;
    struct timespec wall;
    __typeof__(&nvmlDeviceGetProcessUtilization) ask = DRIVER(nvmlDeviceGetProcessUtilization);
    clock_gettime(CLOCK_REALTIME, &wall); /* NVML's time stamps count us of it */
    unsigned long long since =
        (unsigned long long)wall.tv_sec * 1000000u + (unsigned long long)wall.tv_nsec / 1000u - 1000000u;
    if (!handle_of(card, &handle))
        return false;
    if (!ask || ask(handle, samples, &count, since) != NVML_SUCCESS)
        count = 0;
    unsigned long long own = 0, all = 0, mine = 0;
    for (unsigned i = 0; i < count; i++) {
        unsigned same = 0;
        for (unsigned j = 0; j <= i; j++)
            same += samples[j].pid == samples[i].pid;
        per_process = same > per_process ? same : per_process;
        all += samples[i].smUtil;
        if (is_ours(samples[i].pid)) {
            own += samples[i].smUtil;
            own_samples++;
        }
        mine += samples[i].pid == (unsigned)getpid() ? samples[i].smUtil : 0;
    }
    seen->ours = (unsigned)(own / per_process);
    seen->mine = (unsigned)(mine / per_process);
    seen->others = (unsigned)((all - own) / per_process);
    if (!own_samples)
        seen->all = used_by_all(handle);
    return own_samples > 0;
}

bool vgpu_crosscheck(unsigned card, struct vgpu_seen *seen) {
    nvmlProcessUtilizationSample_t *samples = calloc(SAMPLES, sizeof *samples); /* too much for a thread's stack */
    *seen = (struct vgpu_seen){0};
    const bool known = samples && compare(samples, card, seen);
    free(samples);
    return known;
}
