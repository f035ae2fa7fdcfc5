/* The processes on a card: those that hold a context or memory there and that the caller can see. */
#include <stdlib.h>

#include "nvml/library.h"

#define LISTED SIM_SLOTS
#define CLOCK_ERROR_NS 1000000u /* between NVML's clock and the clock of the samples */
#define MODE_ALL 3u             /* NVML_PROCESS_MODE_ALL, which nvml.h of CUDA 12 does not have */

static void release(void *array) {
    free(*(void **)array);
}

/* Heap memory for the time of a function: threads have small stacks. */
#define ARRAY(type, name) __attribute__((cleanup(release))) type *name = calloc(LISTED, sizeof(type))

struct user {
    uint32_t slot;
    int card;
    unsigned pid;
    uint64_t bytes;
};

static unsigned users_of_card(int card, struct user *out, unsigned room) {
    unsigned count = 0;
    uint32_t slots = atomic_load(&library.sim.state->slots_used);
    for (uint32_t slot = 0; slot < slots && count < room; slot++) {
        struct sim_process *process = sim_alive(&library.sim, slot) ? sim_peer(&library.sim, slot) : NULL;
        uint64_t bytes = process ? atomic_load(&process->cards[card].used) : 0;
        bool uses = bytes || (process && atomic_load(&process->cards[card].contexts));
        unsigned pid = uses ? pid_for_caller(slot, process) : 0;
        if (pid)
            out[count++] = (struct user){.slot = slot, .card = card, .pid = pid, .bytes = bytes};
    }
    return count;
}

/* A board lists the processes of all its instances. */
static unsigned users_of(nvmlDevice_t device, struct user *out) {
    if (device->kind != DEVICE_BOARD)
        return users_of_card(device->card, out, LISTED);
    unsigned count = 0;
    for (int i = 1; i < library.handles; i++)
        count += users_of_card(library.devices[i].card, out + count, LISTED - count);
    return count;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    ARRAY(struct user, users);
    ARRAY(nvmlProcessInfo_t, list);
    ENTER_DEVICE(device, count);
    if (!users || !list)
        return NVML_ERROR_MEMORY;
    unsigned have = users_of(device, users);
    for (unsigned i = 0; i < have; i++)
        list[i] = (nvmlProcessInfo_t){.pid = users[i].pid,
                                      .usedGpuMemory = users[i].bytes,
                                      .gpuInstanceId = instance_of(users[i].card),
                                      .computeInstanceId = library.sim.profile->mig ? 0 : 0xffffffff};
    return put_list(infos, count, list, have, sizeof *list);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                  nvmlProcessInfo_v1_t *infos) {
    ARRAY(struct user, users);
    ARRAY(nvmlProcessInfo_v1_t, list);
    ENTER_DEVICE(device, count);
    if (!users || !list)
        return NVML_ERROR_MEMORY;
    unsigned have = users_of(device, users);
    for (unsigned i = 0; i < have; i++)
        list[i] = (nvmlProcessInfo_v1_t){.pid = users[i].pid, .usedGpuMemory = users[i].bytes};
    return put_list(infos, count, list, have, sizeof *list);
}

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *out) {
    ARRAY(struct user, users);
    ENTER_DEVICE(device, out);
    if (!users)
        return NVML_ERROR_MEMORY;
    CHECK_VERSION(out, nvmlProcessDetailList_v1);
    if (out->mode > MODE_ALL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned have = out->mode == NVML_PROCESS_MODE_COMPUTE || out->mode == MODE_ALL ? users_of(device, users) : 0,
             room = out->numProcArrayEntries;
    out->numProcArrayEntries = have;
    if (have > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < have; i++)
        out->procArray[i] = (nvmlProcessDetail_v1_t){.pid = users[i].pid,
                                                     .usedGpuMemory = users[i].bytes,
                                                     .gpuInstanceId = instance_of(users[i].card),
                                                     .computeInstanceId = library.sim.profile->mig ? 0 : 0xffffffff};
    return NVML_SUCCESS;
}

/* No process draws graphics here, and there is no MPS server for shared contexts. */
static nvmlReturn_t none(nvmlDevice_t device, unsigned int *count) {
    ENTER_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

#define NO_PROCESSES(function, type)                                                                                   \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *infos) {                                     \
        (void)infos;                                                                                                   \
        return none(device, count);                                                                                    \
    }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

/* One sample per process that ran between the caller's last seen sample (or a second ago) and the newest sample. */
static unsigned samples_of(nvmlDevice_t device, unsigned long long last, nvmlProcessUtilizationSample_t *out) {
    ARRAY(struct user, users);
    unsigned have = users ? users_of(device, users) : 0, count = 0;
    uint64_t wall = sim_wall_us(), now = sim_now(), ago = last < wall ? (wall - last) * 1000 : 0;
    uint64_t seen = ago < now ? now - ago + CLOCK_ERROR_NS : 0;
    for (unsigned i = 0; i < have; i++) {
        uint64_t sampled;
        bool some;
        uint32_t share = sim_share(&library.sim, device->card, (int)users[i].slot, seen, &sampled, &some);
        if (some)
            out[count++] = (nvmlProcessUtilizationSample_t){
                .pid = users[i].pid, .timeStamp = wall - (now - sampled) / 1000, .smUtil = (share + 5000) / 10000};
    }
    return count;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out,
                                             unsigned int *count, unsigned long long last) {
    ARRAY(nvmlProcessUtilizationSample_t, samples);
    ENTER_DEVICE(device, count);
    if (!samples)
        return NVML_ERROR_MEMORY;
    if (device->kind != DEVICE_CARD)
        return NVML_ERROR_NOT_SUPPORTED; /* NVML: not under MIG */
    unsigned have = samples_of(device, last, samples);
    if (!have)
        return NVML_ERROR_NOT_FOUND;
    if (!out) {
        *count = have;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    return put_list(out, count, samples, have, sizeof *samples);
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *out) {
    ARRAY(nvmlProcessUtilizationSample_t, samples);
    ENTER_DEVICE(device, out);
    if (!samples)
        return NVML_ERROR_MEMORY;
    CHECK_VERSION(out, nvmlProcessesUtilizationInfo_v1);
    unsigned have = samples_of(device, out->lastSeenTimeStamp, samples), room = out->processSamplesCount;
    if (!have)
        return NVML_ERROR_NOT_FOUND;
    out->processSamplesCount = have;
    if (!out->procUtilArray || have > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < have; i++)
        out->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = samples[i].timeStamp, .pid = samples[i].pid, .smUtil = samples[i].smUtil};
    return NVML_SUCCESS;
}
