/* Events: the XIDs that vgpu_sim_inject_xid sets on a card. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "nvml/library.h"

#define POLL_NS 5000000

struct nvmlEventSet_st {
    bool watched[SIM_CARDS];
    uint32_t seen[SIM_CARDS];
};

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER();
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    ENTER();
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER_DEVICE(device, types);
    *types = nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeSingleBitEccError;
    return NVML_SUCCESS;
}

/* Reports only events from now on. */
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    ENTER_DEVICE(device, set);
    unsigned long long supported;
    nvmlDeviceGetSupportedEventTypes(device, &supported);
    if (types & ~supported)
        return NVML_ERROR_NOT_SUPPORTED;
    if (types & nvmlEventTypeXidCriticalError) {
        for (int i = 0; i < library.handles; i++) {
            int card = library.devices[i].card;
            if (card != device->card && device->kind != DEVICE_BOARD)
                continue;
            set->watched[card] = true;
            set->seen[card] = atomic_load(&library.sim.state->cards[card].xid_count);
        }
    }
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    /* with MIG: the instances' events are reported for their board */
    for (int i = library.handles > library.count; i < library.handles; i++) {
        int card = library.devices[i].card;
        uint32_t count = atomic_load(&library.sim.state->cards[card].xid_count),
                 xid = atomic_load(&library.sim.state->cards[card].xid);
        if (!set->watched[card] || count == set->seen[card])
            continue;
        set->seen[card] = count;
        if (!xid)
            continue; /* cleared before a process looked */
        bool instance = library.devices[i].kind == DEVICE_INSTANCE;
        *data = (nvmlEventData_t){.device = &library.devices[instance ? 0 : i],
                                  .eventType = nvmlEventTypeXidCriticalError,
                                  .eventData = xid,
                                  .gpuInstanceId = instance_of(card),
                                  .computeInstanceId = instance ? 0 : 0xffffffff};
        return true;
    }
    return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds) {
    ENTER();
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint64_t end = sim_now() + (uint64_t)milliseconds * 1000000u; !next_event(set, data);) {
        if (sim_now() >= end)
            return NVML_ERROR_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds) {
    return nvmlEventSetWait_v2(set, data, milliseconds);
}
