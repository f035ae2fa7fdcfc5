/* The view of nvidia-smi and similar tools: the slice's memory, this container's processes and its utilisation. The
 * list of cards stays unchanged. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ledger/charge.h"
#include "pacer/pacer.h"
#include "reserves/reported_memory.h"

#define REAP_INTERVAL_MS 100
#define NO_INSTANCE 0xffffffffu /* nvml.h: no MIG instance */
#define PROCESS_MODE_ALL 3u     /* NVML_PROCESS_MODE_ALL, which nvml.h of CUDA 12 does not have */

/* True if the answers for this handle must be the slice's, not the card's; `card` then names the card. */
static bool sliced(nvmlDevice_t device, unsigned *card) {
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return false;
    *card = vgpu_card_of_nvml(device);
    return true;
}

/* The part of NVML's total that CUDA can use. Both interfaces must report the same total, also if the limit is not
 * below the card's size. */
static uint64_t usable(nvmlDevice_t device, uint64_t total) {
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    __typeof__(&nvmlDeviceGetMemoryInfo_v2) get = DRIVER(nvmlDeviceGetMemoryInfo_v2);
    return get && get(device, &memory) == NVML_SUCCESS && memory.reserved < total ? total - memory.reserved : total;
}

static nvmlReturn_t memory_of(nvmlReturn_t result, nvmlDevice_t device, nvmlMemory_t *memory) {
    unsigned card;
    if (result != NVML_SUCCESS || !memory || !sliced(device, &card))
        return result;
    vgpu_reap(REAP_INTERVAL_MS);
    struct vgpu_reported_memory view = vgpu_reported_memory_of(card, usable(device, memory->total), memory->free);
    memory->total = view.total;
    memory->free = view.free;
    memory->used = view.total > view.free ? view.total - view.free : 0;
    return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    NVML_REAL(nvmlDeviceGetMemoryInfo);
    return memory_of(real(device, memory), device, memory);
}

/* If confidential computing is on, the driver reports this for the whole card, too. */
nvmlReturn_t nvmlDeviceGetConfComputeProtectedMemoryUsage(nvmlDevice_t device, nvmlMemory_t *memory) {
    NVML_REAL(nvmlDeviceGetConfComputeProtectedMemoryUsage);
    return memory_of(real(device, memory), device, memory);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    NVML_REAL(nvmlDeviceGetMemoryInfo_v2);
    nvmlReturn_t result = real(device, memory);
    unsigned card;
    if (result != NVML_SUCCESS || !memory || !sliced(device, &card))
        return result;
    vgpu_reap(REAP_INTERVAL_MS);
    struct vgpu_reported_memory view = vgpu_reported_memory_of(card, memory->total - memory->reserved, memory->free);
    memory->total = view.total;
    memory->free = view.free;
    memory->reserved = 0; /* the driver's own share is not part of a slice */
    memory->used = view.total > view.free ? view.total - view.free : 0;
    return result;
}

struct process {
    unsigned pid;
    uint64_t bytes, gpu_ns;
};

/* The live processes of this container that hold memory on a card or have used it; returns their number and writes all
 * to `out`. */
static unsigned processes(unsigned card, struct process out[VGPU_SLOTS]) {
    enum vgpu_mode mode = vgpu_enforcement();
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS)
        return 0;
    vgpu_reap(REAP_INTERVAL_MS);
    const struct vgpu_usage_file *usage = vgpu_mapping()->usage;
    unsigned count = 0, high = atomic_load(&usage->slots_high);
    for (unsigned i = 0; i < high && i < VGPU_SLOTS; i++) {
        int pid = atomic_load(&usage->heads[i].pid);
        if ((atomic_load(&usage->heads[i].owner) & 3) != VGPU_SLOT_LIVE || pid <= 0)
            continue;
        uint64_t bytes = 0;
        for (unsigned lane = 0; lane < VGPU_LANES; lane++)
            bytes += atomic_load(&usage->slots[i].lanes[lane][card][VGPU_DEVICE_BYTES].bytes);
        uint64_t gpu_ns = atomic_load(&usage->slots[i].gpu_ns[card]);
        if (bytes || gpu_ns)
            out[count++] = (struct process){(unsigned)pid, bytes, gpu_ns};
    }
    return count;
}

/* Arrays of this size are too large for the stack of some threads. */
static void release_array(void *array) {
    free(*(void **)array);
}
#define ARRAY(type, name)                                                                                              \
    __attribute__((cleanup(release_array))) type *name = malloc(VGPU_SLOTS * sizeof *name);                            \
    if (!name)                                                                                                         \
    return NVML_ERROR_MEMORY

/* The rules of NVML's process queries: `count` holds the room on entry, and the number of processes on return, even if
 * they do not fit. */
static nvmlReturn_t list(unsigned card, unsigned int *count, nvmlProcessInfo_v2_t *v2, nvmlProcessInfo_v1_t *v1) {
    ARRAY(struct process, found);
    unsigned room = v1 || v2 ? *count : 0;
    unsigned total = processes(card, found);
    *count = total;
    if (total > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < total; i++) {
        if (v2)
            v2[i] = (nvmlProcessInfo_v2_t){.pid = found[i].pid,
                                           .usedGpuMemory = found[i].bytes,
                                           .gpuInstanceId = NO_INSTANCE,
                                           .computeInstanceId = NO_INSTANCE};
        else
            v1[i] = (nvmlProcessInfo_v1_t){.pid = found[i].pid, .usedGpuMemory = found[i].bytes};
    }
    return NVML_SUCCESS;
}

/* Asks the driver first, without room. So bad handles and states get the driver's answer, and no data of other
 * containers is read. */
#define LIST_V2(symbol, is_compute)                                                                                    \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos) {                       \
        NVML_REAL(symbol);                                                                                             \
        unsigned card, none = 0;                                                                                       \
        if (!count || !sliced(device, &card))                                                                          \
            return real(device, count, infos);                                                                         \
        nvmlReturn_t result = real(device, &none, NULL);                                                               \
        if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE)                                          \
            return result;                                                                                             \
        return list(is_compute ? card : VGPU_CARD_UNLISTED, count, infos, NULL);                                       \
    }
#define LIST_V1(symbol, is_compute)                                                                                    \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos) {                       \
        NVML_REAL(symbol);                                                                                             \
        unsigned card, none = 0;                                                                                       \
        if (!count || !sliced(device, &card))                                                                          \
            return real(device, count, infos);                                                                         \
        nvmlReturn_t result = real(device, &none, NULL);                                                               \
        if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE)                                          \
            return result;                                                                                             \
        return list(is_compute ? card : VGPU_CARD_UNLISTED, count, NULL, infos);                                       \
    }

LIST_V1(nvmlDeviceGetComputeRunningProcesses, true)
LIST_V2(nvmlDeviceGetComputeRunningProcesses_v2, true)
LIST_V2(nvmlDeviceGetComputeRunningProcesses_v3, true)
LIST_V1(nvmlDeviceGetGraphicsRunningProcesses, false)
LIST_V2(nvmlDeviceGetGraphicsRunningProcesses_v2, false)
LIST_V2(nvmlDeviceGetGraphicsRunningProcesses_v3, false)
LIST_V1(nvmlDeviceGetMPSComputeRunningProcesses, false)
LIST_V2(nvmlDeviceGetMPSComputeRunningProcesses_v2, false)
LIST_V2(nvmlDeviceGetMPSComputeRunningProcesses_v3, false)

static unsigned utilization_of(unsigned card) {
    enum vgpu_mode mode = vgpu_enforcement();
    return (mode == VGPU_REGION || mode == VGPU_PRIVATE) && card < VGPU_MAX_CARDS ? vgpu_pacer_utilization(card) : 0;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    NVML_REAL(nvmlDeviceGetUtilizationRates);
    nvmlReturn_t result = real(device, utilization);
    unsigned card;
    if (result != NVML_SUCCESS || !utilization || !sliced(device, &card))
        return result;
    utilization->gpu = utilization_of(card);
    if (utilization->memory > utilization->gpu)
        /* traffic of the whole card: this container's part is at most its running time */
        utilization->memory = utilization->gpu;
    return result;
}

/* Replaces the driver's samples of the whole card by this container's. The number and times of the samples, and every
 * other quantity, stay the driver's. */
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last_seen,
                                  nvmlValueType_t *value_type, unsigned int *count, nvmlSample_t *samples) {
    NVML_REAL(nvmlDeviceGetSamples);
    nvmlReturn_t result = real(device, type, last_seen, value_type, count, samples);
    unsigned card;
    if (result != NVML_SUCCESS || !samples || !count ||
        (type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_MEMORY_UTILIZATION_SAMPLES) || !sliced(device, &card))
        return result;
    unsigned share = utilization_of(card);
    for (unsigned i = 0; i < *count; i++)
        if (type == NVML_GPU_UTILIZATION_SAMPLES || samples[i].sampleValue.uiVal > share)
            samples[i].sampleValue.uiVal = share;
    return result;
}

struct sample {
    unsigned pid, share;
};

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
}

/* One sample per process of this container that has used the card; none while the container is idle there. The region
 * has one window per card, which is divided among the processes by their use. */
static unsigned samples_of(unsigned card, struct process found[VGPU_SLOTS], struct sample out[VGPU_SLOTS]) {
    unsigned share = utilization_of(card), total = share ? processes(card, found) : 0, count = 0;
    uint64_t all = 0;
    for (unsigned i = 0; i < total; i++)
        all += found[i].gpu_ns;
    for (unsigned i = 0; i < total; i++)
        if (found[i].gpu_ns)
            out[count++] =
                (struct sample){found[i].pid, (unsigned)((double)share * (double)found[i].gpu_ns / (double)all + 0.5)};
    return count;
}

/* Whether the driver, asked without room, would list processes; if not, the program gets the driver's answer. */
static bool would_list(nvmlReturn_t result) {
    return result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE || result == NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long last_seen) {
    NVML_REAL(nvmlDeviceGetProcessUtilization);
    unsigned card, none = 0;
    if (!count || !sliced(device, &card))
        return real(device, samples, count, last_seen);
    nvmlReturn_t result = real(device, NULL, &none, last_seen);
    if (!would_list(result))
        return result;
    ARRAY(struct sample, found);
    ARRAY(struct process, all);
    unsigned long long now = now_us();
    unsigned total = now > last_seen ? samples_of(card, all, found) : 0, room = samples ? *count : 0;
    if (!total)
        return NVML_ERROR_NOT_FOUND;
    *count = total;
    if (total > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < total; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){.pid = found[i].pid, .timeStamp = now, .smUtil = found[i].share};
    return NVML_SUCCESS;
}

/* The two queries below take a structure with a version. The hook asks the driver with an empty structure of the same
 * version. A version that only the driver knows is refused, as an older driver would do. */
#define LARGEST_STRUCT 1024u
#define ASK_EMPTY(given, ...)                                                                                          \
    union {                                                                                                            \
        __typeof__(*given) known;                                                                                      \
        char room[LARGEST_STRUCT];                                                                                     \
    } empty = {.room = {0}};                                                                                           \
    empty.known = (__typeof__(*given)){.version = given->version, __VA_ARGS__};                                        \
    nvmlReturn_t result = real(device, &empty.known);                                                                  \
    if (!would_list(result))                                                                                           \
    return result

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *out) {
    NVML_REAL(nvmlDeviceGetProcessesUtilizationInfo);
    unsigned card;
    if (!out || !sliced(device, &card))
        return real(device, out);
    ASK_EMPTY(out, .lastSeenTimeStamp = 0);
    if (out->version != nvmlProcessesUtilizationInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    ARRAY(struct sample, found);
    ARRAY(struct process, all);
    unsigned long long now = now_us();
    unsigned total = now > out->lastSeenTimeStamp ? samples_of(card, all, found) : 0,
             room = out->procUtilArray ? out->processSamplesCount : 0;
    if (!total)
        return NVML_ERROR_NOT_FOUND;
    out->processSamplesCount = total;
    if (total > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < total; i++)
        out->procUtilArray[i] =
            (nvmlProcessUtilizationInfo_v1_t){.timeStamp = now, .pid = found[i].pid, .smUtil = found[i].share};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *out) {
    NVML_REAL(nvmlDeviceGetRunningProcessDetailList);
    unsigned card;
    if (!out || !sliced(device, &card))
        return real(device, out);
    ASK_EMPTY(out, .mode = out->mode);
    if (out->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    ARRAY(struct process, found);
    bool computing = out->mode == NVML_PROCESS_MODE_COMPUTE || out->mode == PROCESS_MODE_ALL;
    unsigned total = computing ? processes(card, found) : 0, room = out->procArray ? out->numProcArrayEntries : 0;
    out->numProcArrayEntries = total;
    if (total > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < total; i++)
        out->procArray[i] = (nvmlProcessDetail_v1_t){.pid = found[i].pid,
                                                     .usedGpuMemory = found[i].bytes,
                                                     .gpuInstanceId = NO_INSTANCE,
                                                     .computeInstanceId = NO_INSTANCE};
    return NVML_SUCCESS;
}
