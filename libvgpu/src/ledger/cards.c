/* Maps CUDA devices, NVML handles and contexts to entries of the limits. */
#define _GNU_SOURCE
#include "ledger/cards.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ledger/attach.h"
#include "ledger/process.h"

#define MAX_DEVICES 64
#define UUID_TEXT 37 /* 36 characters and NUL, without the prefix GPU- or MIG- */

/* Result of a search, valid for one state of the limits: selector << 8 | card. 0: not searched yet. (A region's
 * selectors start at 1; otherwise the search only repeats.) */
typedef _Atomic uint64_t cached_card;

static uint64_t limits_state(void) {
    /* the caller has attached, or could not yet: then the state is that of no limits */
    const struct vgpu_limits_file *limits = vgpu_mapped.limits;
    return limits ? atomic_load_explicit(&limits->selector, memory_order_acquire) + 1 : UINT64_MAX >> 8;
}

static const char *without_prefix(const char *uuid) {
    return strncmp(uuid, "GPU-", 4) == 0 || strncmp(uuid, "MIG-", 4) == 0 ? uuid + 4 : uuid;
}

/* `position` returns NVML's index of the card; called only if an entry has no UUID; -1: unknown. */
static unsigned search(const char *uuid, int (*position)(const void *), const void *argument) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits)
        return VGPU_CARD_UNLISTED;
    bool anonymous = false;
    for (unsigned i = 0; i < limits->card_count && i < VGPU_MAX_CARDS; i++) {
        if (!limits->cards[i].uuid[0])
            anonymous = true;
        else if (uuid[0] && strcasecmp(without_prefix(limits->cards[i].uuid), uuid) == 0)
            return i;
    }
    if (!anonymous)
        return VGPU_CARD_UNLISTED;
    int index = position(argument);
    return index >= 0 && index < (int)limits->card_count && !limits->cards[index].uuid[0] ? (unsigned)index
                                                                                          : VGPU_CARD_UNLISTED;
}

struct device_identity {
    CUdevice device;
    const char *uuid;
};

/* NVML's index of a CUDA device; the CUDA ordinal if NVML does not know the device. */
static int position_of_device(const void *argument) {
    const struct device_identity *identity = argument;
    nvmlDevice_t handle;
    unsigned index;
    char text[4 + UUID_TEXT];
    if (!DRIVER(nvmlInit_v2) || !DRIVER(nvmlDeviceGetHandleByUUID) || !DRIVER(nvmlDeviceGetIndex) ||
        DRIVER(nvmlInit_v2)() != NVML_SUCCESS)
        return identity->device;
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "%s%s", i ? "MIG-" : "GPU-", identity->uuid);
        if (DRIVER(nvmlDeviceGetHandleByUUID)(text, &handle) == NVML_SUCCESS)
            return DRIVER(nvmlDeviceGetIndex)(handle, &index) == NVML_SUCCESS ? (int)index : identity->device;
    }
    return identity->device;
}

static bool uuid_of_device(CUdevice device, char text[UUID_TEXT]) {
    CUuuid uuid;
    CUresult (*get)(CUuuid *, CUdevice) =
        DRIVER(cuDeviceGetUuid_v2) ? DRIVER(cuDeviceGetUuid_v2) : DRIVER(cuDeviceGetUuid);
    if (!get || get(&uuid, device) != CUDA_SUCCESS)
        return false;
    const unsigned char *b = (const unsigned char *)uuid.bytes;
    snprintf(text, UUID_TEXT, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return true;
}

unsigned vgpu_card_of_device(CUdevice device) {
    static cached_card cache[MAX_DEVICES];
    uint64_t state = limits_state();
    if (device >= 0 && device < MAX_DEVICES) {
        uint64_t cached = atomic_load_explicit(&cache[device], memory_order_relaxed);
        if (cached >> 8 == state)
            return (unsigned)(cached & 0xff);
    }
    char uuid[UUID_TEXT];
    if (!uuid_of_device(device, uuid))
        return VGPU_CARD_UNLISTED;
    struct device_identity identity = {device, uuid};
    unsigned card = search(uuid, position_of_device, &identity);
    if (device >= 0 && device < MAX_DEVICES)
        atomic_store_explicit(&cache[device], state << 8 | card, memory_order_relaxed);
    return card;
}

bool vgpu_device_exists(CUdevice device) {
    char uuid[UUID_TEXT];
    return vgpu_card_of_device(device) != VGPU_CARD_UNLISTED || uuid_of_device(device, uuid);
}

static int position_of_nvml(const void *argument) {
    unsigned index;
    return DRIVER(nvmlDeviceGetIndex) &&
                   DRIVER(nvmlDeviceGetIndex)(*(const nvmlDevice_t *)argument, &index) == NVML_SUCCESS
               ? (int)index
               : -1;
}

unsigned vgpu_card_of_nvml(nvmlDevice_t device) {
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    if (!DRIVER(nvmlDeviceGetUUID) || DRIVER(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != NVML_SUCCESS)
        return VGPU_CARD_UNLISTED;
    return search(without_prefix(uuid), position_of_nvml, &device);
}

/* A locality domain (CUDA 13.3) is a part of a device's memory; the first byte of its location is the device. */
#define LOCALITY_DOMAIN 6
/* CUmemLocationType of cuda.h; older headers lack some values. */
enum { HOST = 2, HOST_NUMA = 3, HOST_NUMA_CURRENT = 4 };

bool vgpu_location_is_known(const CUmemLocation *location) {
    switch ((unsigned)location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return location->id >= 0;
    case HOST:
    case HOST_NUMA:
    case HOST_NUMA_CURRENT:
    case LOCALITY_DOMAIN: return true;
    default: return false;
    }
}

CUdevice vgpu_device_of_location(const CUmemLocation *location) {
    CUdevice here;
    switch ((unsigned)location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return location->id;
    case HOST:
    case HOST_NUMA:
    case HOST_NUMA_CURRENT: return VGPU_NO_DEVICE;
    case LOCALITY_DOMAIN: return (CUdevice) * (const unsigned char *)&location->id;
    /* unknown location: charge the current device, so that the memory is charged somewhere */
    default: return DRIVER(cuCtxGetDevice) && DRIVER(cuCtxGetDevice)(&here) == CUDA_SUCCESS ? here : 0;
    }
}

static _Atomic uint64_t places_epoch;

void vgpu_places_forget(void) {
    atomic_fetch_add(&places_epoch, 1);
}

/* This thread's last result, and the versions of contexts and limits at that time. */
static __thread __attribute__((tls_model("initial-exec"))) struct {
    struct vgpu_place place;
    uint64_t epoch;
    uint64_t limits;
} last;

static bool find_place(struct vgpu_place *place, uint64_t epoch, uint64_t limits) {
    __typeof__(&cuCtxGetDevice) get_device = DRIVER(cuCtxGetDevice);
    if (!get_device || get_device(&place->device) != CUDA_SUCCESS)
        return false;
    place->card = vgpu_card_of_device(place->device);
    if (!vgpu_above.context_seen(place->context, place->device, place->card))
        return true; /* do not remember the result: the next call looks again */
    last.place = *place;
    last.epoch = epoch;
    last.limits = limits;
    return true;
}

bool vgpu_place_now(struct vgpu_place *place) {
    __typeof__(&cuCtxGetCurrent) get_current = DRIVER(cuCtxGetCurrent);
    if (__builtin_expect(!get_current || get_current(&place->context) != CUDA_SUCCESS || !place->context, 0))
        return false;
    uint64_t epoch = atomic_load_explicit(&places_epoch, memory_order_acquire) + 1, limits = limits_state();
    if (__builtin_expect(last.place.context != place->context || last.epoch != epoch || last.limits != limits, 0))
        return find_place(place, epoch, limits);
    *place = last.place;
    return true;
}

/* A created stream needs no current context (cuda.h, cuMemAllocAsync), so this makes the stream's context current to
 * read its place. */
bool vgpu_place_of_stream(CUstream stream, struct vgpu_place *place) {
    const bool here = vgpu_place_now(place);
    CUcontext context = NULL, popped;
    __typeof__(&cuStreamGetCtx) get_context = DRIVER(cuStreamGetCtx);
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !get_context ||
        get_context(stream, &context) != CUDA_SUCCESS || !context || (here && context == place->context))
        return here;
    if (!DRIVER(cuCtxPushCurrent_v2) || !DRIVER(cuCtxPopCurrent_v2) ||
        DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return here;
    const bool found = vgpu_place_now(place);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return found;
}

bool vgpu_primary_is_active(CUdevice device) {
    unsigned flags;
    int active = 0;
    __typeof__(&cuDevicePrimaryCtxGetState) state = DRIVER(cuDevicePrimaryCtxGetState);
    return state && state(device, &flags, &active) == CUDA_SUCCESS && active;
}
