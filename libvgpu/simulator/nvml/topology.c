/* The position of cards: pairs share a PCIe switch, and each half of the cards has a NUMA node. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "nvml/library.h"

static int node_of(nvmlDevice_t device) {
    return sim_node_of(&library.sim, device->card);
}

static nvmlGpuTopologyLevel_t level_between(nvmlDevice_t a, nvmlDevice_t b) {
    return a == b                       ? NVML_TOPOLOGY_INTERNAL
           : node_of(a) != node_of(b)   ? NVML_TOPOLOGY_SYSTEM
           : a->card / 2 == b->card / 2 ? NVML_TOPOLOGY_SINGLE
                                        : NVML_TOPOLOGY_NODE;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level) {
    ENTER_DEVICE(a, level);
    ENTER_DEVICE(b, level);
    *level = level_between(a, b);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned int *count,
                                              nvmlDevice_t *out) {
    nvmlDevice_t list[SIM_CARDS];
    unsigned have = 0;
    ENTER_DEVICE(device, count);
    for (int i = 0; i < library.count; i++)
        if (&library.devices[i] != device && level_between(device, &library.devices[i]) == level)
            list[have++] = &library.devices[i];
    unsigned room = *count < have ? *count : have;
    *count = have;
    if (out)
        memcpy(out, list, room * sizeof *list);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t a, nvmlDevice_t b, int *same) {
    ENTER_DEVICE(a, same);
    ENTER_DEVICE(b, same);
    *same = a == b;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
                                         nvmlAffinityScope_t scope) {
    (void)scope;
    ENTER_DEVICE(device, nodes && size);
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = 1ul << node_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *cpus) {
    ENTER_DEVICE(device, cpus && size);
    long count = sysconf(_SC_NPROCESSORS_CONF);
    memset(cpus, 0, size * sizeof *cpus);
    for (long i = 0; i < count && i < (long)size * 64; i++)
        cpus[i / 64] |= 1ul << i % 64;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size, unsigned long *cpus,
                                                 nvmlAffinityScope_t scope) {
    (void)scope;
    return nvmlDeviceGetCpuAffinity(device, size, cpus);
}

static nvmlReturn_t link_check(nvmlDevice_t device, unsigned link, const void *out) {
    ENTER_DEVICE(device, out);
    if (link >= NVML_NVLINK_MAX_LINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    return link < (unsigned)library.sim.profile->nvlinks ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static bool link_active(void) {
    return library.sim.state->card_count > 1; /* a single card has no partner for a link */
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state) {
    nvmlReturn_t result = link_check(device, link, state);
    if (!result)
        *state = link_active() ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version) {
    nvmlReturn_t result = link_check(device, link, version);
    if (!result)
        *version = (unsigned)library.sim.profile->nvlink_generation;
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, nvmlNvLinkCapability_t capability,
                                           unsigned int *value) {
    nvmlReturn_t result = link_check(device, link, value);
    if (!result)
        *value = capability == NVML_NVLINK_CAP_P2P_SUPPORTED || capability == NVML_NVLINK_CAP_P2P_ATOMICS;
    return result;
}

/* The links of a card lead to the other cards in turn. */
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    nvmlReturn_t result = link_check(device, link, pci);
    if (result)
        return result;
    if (!link_active())
        return NVML_ERROR_INVALID_STATE;
    int cards = (int)library.sim.state->card_count, other = (device->card + 1 + (int)link % (cards - 1)) % cards;
    struct nvmlDevice_st remote = {.card = other};
    for (int i = 0; i < library.count; i++)
        if (library.devices[i].card == remote.card)
            return nvmlDeviceGetPciInfo_v3(&library.devices[i], pci);
    return NVML_ERROR_NO_PERMISSION; /* the other card is not in this container */
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    nvmlPciInfo_t full;
    nvmlReturn_t result = link_check(device, link, pci);
    if (!result)
        result = nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &full);
    if (!result)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, busId));
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type) {
    nvmlReturn_t result = link_check(device, link, type);
    if (!result)
        *type = link_active() ? NVML_NVLINK_DEVICE_TYPE_GPU : NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter,
                                             unsigned long long *value) {
    (void)counter;
    nvmlReturn_t result = link_check(device, link, value);
    if (!result)
        *value = 0;
    return result;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t index,
                                    nvmlGpuP2PStatus_t *status) {
    ENTER_DEVICE(a, status);
    ENTER_DEVICE(b, status);
    (void)index;
    *status = library.sim.profile->nvlinks && a != b ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
