/* Makes and maps the memory of blocks, on a card or in host memory. */
#define _GNU_SOURCE
#include "tier/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ledger/attach.h"
#include "reserves/capture.h"
#include "tier/blocks.h"

/* Numbers of cuda.h of CUDA 13; older headers lack some. */
#define CARD_MAPS_MEMORY 102
#define HOST_NODE 134
#define HOST_NODE_MAPS_MEMORY 141

#define LEAST_RESERVE (UINT64_C(256) << 20)
#define MOST_RESERVE (UINT64_C(4) << 30)
#define RESERVE_PART 20u

uint64_t vgpu_tier_rounded(uint64_t bytes) {
    return bytes <= UINT64_C(1) << 48 ? (bytes + VGPU_TIER_GRANULE - 1) & ~(VGPU_TIER_GRANULE - 1) : 0;
}

static bool attribute(CUdevice device, int which, int *value) {
    *value = 0;
    return DRIVER(cuDeviceGetAttribute) &&
           DRIVER(cuDeviceGetAttribute)(value, (CUdevice_attribute)which, device) == CUDA_SUCCESS;
}

static bool has_calls(void) {
    return DRIVER(cuMemCreate) && DRIVER(cuMemRelease) && DRIVER(cuMemMap) && DRIVER(cuMemUnmap) &&
           DRIVER(cuMemSetAccess) && DRIVER(cuMemAddressReserve) && DRIVER(cuMemAddressFree);
}

#define DEVICES 64 /* devices with remembered abilities; for larger numbers the driver is asked each time */
enum { KNOWN = 1, MAPS_CARD = 2, MAPS_HOST = 4, NODE_SHIFT = 3 };
/* The abilities of a device never change. */
static _Atomic uint32_t abilities[DEVICES];

static uint32_t ask_abilities(CUdevice device) {
    int maps_card, maps_host, node;
    if (!has_calls())
        return KNOWN;
    const bool answered = attribute(device, CARD_MAPS_MEMORY, &maps_card);
    attribute(device, HOST_NODE_MAPS_MEMORY, &maps_host); /* older drivers do not know this attribute */
    if (!attribute(device, HOST_NODE, &node) || node < 0) /* a machine without NUMA nodes */
        node = 0;
    return (answered ? KNOWN : 0u) | (maps_card ? MAPS_CARD : 0u) | (maps_host ? MAPS_HOST : 0u) |
           (uint32_t)node << NODE_SHIFT;
}

static uint32_t abilities_of(CUdevice device) {
    const bool kept = device >= 0 && device < DEVICES;
    uint32_t found = kept ? atomic_load_explicit(&abilities[device], memory_order_relaxed) : 0;
    if (found)
        return found;
    found = ask_abilities(device);
    if (kept && found & KNOWN)
        atomic_store_explicit(&abilities[device], found, memory_order_relaxed);
    return found;
}

bool vgpu_tier_maps_card(CUdevice device) {
    return abilities_of(device) & MAPS_CARD;
}

enum { HOST_WORKS = 0xfffffffe, HOST_FAILS = 0xffffffff };

static CUresult make_and_map(CUdevice device, int node) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = node}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    bool lost = false;
    CUresult result = DRIVER(cuMemCreate)(&handle, VGPU_TIER_GRANULE, &properties, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = DRIVER(cuMemAddressReserve)(&base, VGPU_TIER_GRANULE, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = vgpu_tier_map(device, false, base, VGPU_TIER_GRANULE, handle, &lost);
        if (result == CUDA_SUCCESS)
            result = DRIVER(cuMemUnmap)(base, VGPU_TIER_GRANULE);
        DRIVER(cuMemAddressFree)(base, VGPU_TIER_GRANULE);
    }
    DRIVER(cuMemRelease)(handle);
    return result;
}

static bool has_ended(const struct vgpu_usage_file *usage, uint32_t slot) {
    const int32_t pid = slot < VGPU_SLOTS ? atomic_load(&usage->heads[slot].pid) : 0;
    return pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH);
}

/* The attribute promises more than some NUMA nodes, sandboxes and drivers keep, and some drivers crash. So one process
 * of a container tries, and records the attempt first. */
static bool host_works(CUdevice device, int node) {
    struct vgpu_usage_file *usage = vgpu_mapping()->usage;
    enum vgpu_mode mode;
    if (usage && atomic_load_explicit(&usage->host_tried, memory_order_acquire) != HOST_WORKS)
        vgpu_count_kind(0, VGPU_KIND_POOL, 0); /* takes the slot whose number identifies the trying process */
    const struct vgpu_local *local = vgpu_attached(&mode);
    if (!usage || !local || local->member.slot == VGPU_NO_SLOT)
        return true; /* there is no limit */
    const uint32_t own = local->member.slot + 1;
    uint32_t tried = atomic_load_explicit(&usage->host_tried, memory_order_acquire);
    if (__builtin_expect(tried == HOST_WORKS, 1))
        return true;
    const int kept = errno;
    if (tried == 0 && atomic_compare_exchange_strong(&usage->host_tried, &tried, own)) {
        const CUstreamCaptureMode capture = vgpu_relax();
        const CUresult result = make_and_map(device, node);
        vgpu_restore(capture);
        /* out of memory now says nothing about later */
        tried = result == CUDA_SUCCESS ? HOST_WORKS : result == CUDA_ERROR_OUT_OF_MEMORY ? 0 : HOST_FAILS;
        atomic_store(&usage->host_tried, tried);
    } else if (tried != 0 && tried < HOST_WORKS && tried != own && has_ended(usage, tried - 1)) {
        atomic_compare_exchange_strong(&usage->host_tried, &tried, HOST_FAILS);
    }
    errno = kept;
    return tried == HOST_WORKS;
}

bool vgpu_tier_maps_host(CUdevice device, int *node) {
    const uint32_t found = abilities_of(device);
    *node = (int)(found >> NODE_SHIFT);
    return found & MAPS_HOST && host_works(device, *node);
}

/* Bytes of a line of /proc/meminfo (proc(5): kB, which are KiB). */
static bool line_of(const char *text, const char *name, uint64_t *bytes) {
    const char *line = strstr(text, name);
    if (!line)
        return false;
    *bytes = strtoull(line + strlen(name), NULL, 10) << 10;
    return true;
}

bool vgpu_meminfo_spares(const char *text, uint64_t bytes) {
    uint64_t total, available;
    if (!line_of(text, "MemTotal:", &total) || !line_of(text, "MemAvailable:", &available))
        return true;
    uint64_t reserve = total / RESERVE_PART;
    reserve = reserve < LEAST_RESERVE ? LEAST_RESERVE : reserve > MOST_RESERVE ? MOST_RESERVE : reserve;
    return available >= reserve && bytes <= available - reserve;
}

bool vgpu_host_spares(uint64_t bytes) {
    char text[512]; /* both lines are among the first three */
    const int kept = errno, file = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    ssize_t length = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0)
        close(file);
    errno = kept;
    if (length < 0)
        return true;
    text[length] = 0;
    return vgpu_meminfo_spares(text, bytes);
}

CUresult vgpu_tier_create(CUdevice device, bool on_device, uint64_t bytes, CUmemGenericAllocationHandle *handle) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    int node;
    if (on_device) {
        properties.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    } else {
        if (!vgpu_tier_maps_host(device, &node))
            return CUDA_ERROR_NOT_SUPPORTED;
        properties.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = node};
    }
    return DRIVER(cuMemCreate)(handle, bytes, &properties, 0);
}

/* By device: a bit for each device that may access its memory. Devices with larger numbers have no peers. */
static _Atomic uint64_t peers[DEVICES];

void vgpu_tier_add_peer(CUdevice device, CUdevice other) {
    if (device >= 0 && device < DEVICES && other >= 0 && other < DEVICES)
        atomic_fetch_or(&peers[device], UINT64_C(1) << other);
}

void vgpu_tier_peers_forget(void) {
    for (unsigned i = 0; i < DEVICES; i++)
        atomic_store(&peers[i], 0);
}

bool vgpu_tier_is_peer(CUdevice other, CUdevice device) {
    return device >= 0 && device < DEVICES && other >= 0 && other < DEVICES && atomic_load(&peers[device]) >> other & 1;
}

/* All devices may access host memory, as with the driver's own host memory. A device that cannot is an error only if it
 * was made a peer. */
static CUresult give_others_access(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes) {
    int count = 0;
    if (on_device && (device < 0 || device >= DEVICES || !atomic_load_explicit(&peers[device], memory_order_relaxed)))
        return CUDA_SUCCESS;
    if (!DRIVER(cuDeviceGetCount) || DRIVER(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    for (CUdevice other = 0; other < count; other++) {
        const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = other},
                                        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        const bool peer = vgpu_tier_is_peer(other, device);
        if (other == device || (on_device && !peer))
            continue;
        const CUresult result = DRIVER(cuMemSetAccess)(base, bytes, &access, 1);
        if (result != CUDA_SUCCESS && peer)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult vgpu_tier_give_access(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes) {
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUresult result = DRIVER(cuMemSetAccess)(base, bytes, &access, 1);
    return result == CUDA_SUCCESS ? give_others_access(device, on_device, base, bytes) : result;
}

CUresult vgpu_tier_map(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes,
                       CUmemGenericAllocationHandle handle, bool *lost) {
    CUresult result = DRIVER(cuMemMap)(base, bytes, 0, handle, 0);
    *lost = false;
    if (result == CUDA_SUCCESS) {
        result = vgpu_tier_give_access(device, on_device, base, bytes);
        if (result != CUDA_SUCCESS)
            *lost = DRIVER(cuMemUnmap)(base, bytes) != CUDA_SUCCESS;
    }
    return result;
}
