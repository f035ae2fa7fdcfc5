/* Decides where new blocks go. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include "base/log.h"
#include "ledger/charge.h"
#include "reserves/capture.h"
#include "tier/memory.h"
#include "tier/move.h"

#define HEADROOM_PART 32u
#define MOST_HEADROOM (UINT64_C(256) << 20)
#define CONTEXT_PART 8u

enum vgpu_tier_mode vgpu_tier_mode(void) {
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return VGPU_TIER_OFF;
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits || !(limits->flags & VGPU_OVERSUBSCRIBE))
        return VGPU_TIER_OFF;
    return limits->flags & VGPU_MOVABLE ? VGPU_TIER_MOVABLE : VGPU_TIER_STATIC;
}

uint64_t vgpu_tier_headroom(unsigned card) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits || card >= limits->card_count)
        return 0;
    const struct vgpu_card_limit *limit = &limits->cards[card];
    const uint64_t above = limit->memory > limit->guarantee ? limit->memory - limit->guarantee : 0;
    uint64_t headroom = limit->guarantee / HEADROOM_PART;
    if (headroom > MOST_HEADROOM)
        headroom = MOST_HEADROOM;
    if (headroom < limit->context_bytes && limit->context_bytes <= limit->guarantee / CONTEXT_PART)
        headroom = limit->context_bytes;
    return (headroom < above ? headroom : above) & ~(VGPU_TIER_GRANULE - 1);
}

/* A block being placed; its allocated bytes are already charged. */
struct placing {
    const struct vgpu_place *place;
    uint64_t asked;
    struct vgpu_ticket allocated;
};

/* Charges the allocated bytes. Before a refusal, gives back what the library keeps. */
static bool charge_allocated(struct placing *placing) {
    const unsigned card = placing->place->card;
    return vgpu_charge_allocated(card, placing->asked, &placing->allocated) ||
           (card != VGPU_CARD_UNLISTED && vgpu_give_back(card) &&
            vgpu_charge_allocated(card, placing->asked, &placing->allocated));
}

static bool charge_beside(struct vgpu_ticket *ticket, uint64_t bytes, uint64_t spare) {
    return vgpu_charge_beside(ticket, bytes, spare) ||
           (vgpu_give_back(ticket->card) && vgpu_charge_beside(ticket, bytes, spare));
}

bool vgpu_tier_charge_card(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket) {
    const struct vgpu_place place = {.card = card};
    struct placing placing = {.place = &place, .asked = bytes};
    if (!charge_allocated(&placing))
        return false;
    *ticket = placing.allocated;
    if (charge_beside(ticket, bytes, spare))
        return true;
    vgpu_uncharge(*ticket, bytes);
    return false;
}

/* Charges host memory, if the machine and the container's budget have room. */
static bool charge_host(unsigned card, uint64_t bytes, struct vgpu_ticket *where) {
    if (vgpu_host_spares(bytes))
        return vgpu_charge(card, VGPU_HOST_BYTES, bytes, where);
    vgpu_log(VGPU_LOG_WARNING, "the machine has no %llu bytes of host memory to spare", (unsigned long long)bytes);
    return false;
}

bool vgpu_tier_charge_host(unsigned card, uint64_t bytes, struct vgpu_ticket *allocated, struct vgpu_ticket *where) {
    const struct vgpu_place place = {.card = card};
    struct placing placing = {.place = &place, .asked = bytes};
    if (!charge_allocated(&placing))
        return false;
    *allocated = placing.allocated;
    if (charge_host(card, bytes, where))
        return true;
    vgpu_uncharge(*allocated, bytes);
    return false;
}

bool vgpu_tier_host_location(CUdevice device, CUmemLocation *location) {
    int node;
    if (!vgpu_tier_maps_host(device, &node))
        return false;
    *location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = node};
    return true;
}

/* Allocates the driver's own memory of the card, booked as without a tier. */
static CUresult plain(const struct placing *placing, uint64_t spare, CUdeviceptr *pointer) {
    struct vgpu_ticket ticket = placing->allocated;
    if (!charge_beside(&ticket, placing->asked, spare))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr made = 0;
    CUresult result = DRIVER(cuMemAlloc_v2) ? DRIVER(cuMemAlloc_v2)(&made, placing->asked) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) {
        const struct vgpu_holding holding = {
            .bytes = placing->asked, .owner = placing->place->context, .ticket = ticket, .kind = VGPU_KIND_BUFFER};
        if (vgpu_sizes_put(VGPU_POINTER, made, &holding)) {
            *pointer = made;
            return CUDA_SUCCESS;
        }
        DRIVER(cuMemFree_v2)(made);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    vgpu_release_beside(&ticket, placing->asked);
    return result;
}

/* Books a block that is made and charged. CUDA_ERROR_OUT_OF_MEMORY: there are too many blocks. */
static CUresult entered(const struct vgpu_tier_record *record, CUdeviceptr *pointer) {
    if (vgpu_tier_enter(record) == VGPU_TIER_NONE)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!record->on_device)
        vgpu_log(VGPU_LOG_DEBUG, "%llu bytes at 0x%llx lie in host memory behind card %u",
                 (unsigned long long)record->asked, (unsigned long long)record->base, record->card);
    *pointer = record->base;
    return CUDA_SUCCESS;
}

static struct vgpu_tier_record record_of(const struct placing *placing, uint64_t bytes, bool on_device) {
    return (struct vgpu_tier_record){.asked = placing->asked,
                                     .bytes = bytes,
                                     .context = placing->place->context,
                                     .device = placing->place->device,
                                     .card = placing->place->card,
                                     .allocated = placing->allocated,
                                     .on_device = on_device};
}

/* Maps the memory of a new block at addresses of the tier. `lost`: after a failure the memory stays mapped there. */
static CUresult map(struct vgpu_tier_record *record, CUdeviceptr *pointer, bool *lost) {
    vgpu_tier_lock();
    record->base = vgpu_tier_reserve(record->bytes);
    CUresult result = record->base ? vgpu_tier_map(record->device, record->on_device, record->base, record->bytes,
                                                   record->handle, lost)
                                   : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        result = entered(record, pointer);
        if (result != CUDA_SUCCESS)
            *lost = DRIVER(cuMemUnmap)(record->base, record->bytes) != CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS && record->base && !*lost)
        vgpu_tier_unreserve(record->base, record->bytes);
    vgpu_tier_unlock();
    return result;
}

static CUresult mapped(const struct placing *placing, bool on_device, uint64_t spare, CUdeviceptr *pointer) {
    const unsigned card = placing->place->card;
    struct vgpu_tier_record record = record_of(placing, vgpu_tier_rounded(placing->asked), on_device);
    record.movable = on_device || (vgpu_tier_mode() == VGPU_TIER_MOVABLE && vgpu_tier_maps_card(record.device));
    bool room = record.bytes != 0;
    if (room && on_device)
        room = vgpu_charge_resident(card, record.bytes, spare, &record.where) ||
               (vgpu_give_back(card) && vgpu_charge_resident(card, record.bytes, spare, &record.where));
    else if (room)
        room = charge_host(card, record.bytes, &record.where);
    if (!room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool lost = false;
    const CUstreamCaptureMode mode = vgpu_relax();
    CUresult result = vgpu_tier_create(record.device, on_device, record.bytes, &record.handle);
    if (result == CUDA_SUCCESS) {
        result = map(&record, pointer, &lost);
        if (result != CUDA_SUCCESS)
            DRIVER(cuMemRelease)(record.handle);
    }
    vgpu_restore(mode);
    if (lost)
        vgpu_log(VGPU_LOG_ALERT,
                 "%llu bytes at 0x%llx are lost: the driver does not unmap what it does not give access to (%d)",
                 (unsigned long long)record.bytes, (unsigned long long)record.base, (int)result);
    else if (result != CUDA_SUCCESS)
        vgpu_uncharge(record.where, record.bytes);
    return result;
}

/* Allocates ordinary host memory of the driver, at the driver's own address. */
static CUresult pinned(const struct placing *placing, CUdeviceptr *pointer) {
    struct vgpu_tier_record record = record_of(placing, placing->asked, false);
    void *memory = NULL;
    if (!DRIVER(cuMemHostAlloc) || !DRIVER(cuMemHostGetDevicePointer_v2) || !DRIVER(cuMemFreeHost) ||
        !charge_host(record.card, record.bytes, &record.where))
        return CUDA_ERROR_OUT_OF_MEMORY;
    const CUstreamCaptureMode mode = vgpu_relax();
    CUresult result =
        DRIVER(cuMemHostAlloc)(&memory, record.bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    vgpu_restore(mode);
    if (result == CUDA_SUCCESS) {
        result = DRIVER(cuMemHostGetDevicePointer_v2)(&record.base, memory, 0);
        record.pinned = true;
        record.memory = memory;
        vgpu_tier_lock();
        if (result == CUDA_SUCCESS)
            result = entered(&record, pointer);
        vgpu_tier_unlock();
        if (result != CUDA_SUCCESS)
            DRIVER(cuMemFreeHost)(memory);
    }
    if (result != CUDA_SUCCESS)
        vgpu_uncharge(record.where, record.bytes);
    return result;
}

static CUresult on_host(const struct placing *placing, CUdeviceptr *pointer) {
    int node;
    if (vgpu_tier_is_large(placing->asked) && vgpu_tier_maps_host(placing->place->device, &node)) {
        const CUresult result = mapped(placing, false, 0, pointer);
        if (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY)
            return result;
    }
    return pinned(placing, pointer);
}

static CUresult on_card(const struct placing *placing, uint64_t spare, CUdeviceptr *pointer) {
    int node;
    const bool maps = vgpu_tier_is_large(placing->asked) && vgpu_tier_mode() == VGPU_TIER_MOVABLE &&
                      vgpu_tier_maps_card(placing->place->device) &&
                      vgpu_tier_maps_host(placing->place->device, &node); /* else the block could not move down later */
    return maps ? mapped(placing, true, spare, pointer) : plain(placing, spare, pointer);
}

/* Tries all places. Out of memory leads to the next place; any other answer of the driver goes to the program. */
static CUresult anywhere(const struct placing *placing, CUdeviceptr *pointer) {
    const unsigned card = placing->place->card;
    const uint64_t spare = vgpu_tier_is_large(placing->asked) ? vgpu_tier_headroom(card) + vgpu_room_wanted(card) : 0;
    CUresult result = on_card(placing, spare, pointer);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        result = on_host(placing, pointer);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && spare)
        result = on_card(placing, 0, pointer);
    return result;
}

CUresult vgpu_tier_allocate(CUdeviceptr *pointer, uint64_t bytes) {
    struct vgpu_place place;
    struct placing placing = {.place = &place, .asked = bytes};
    if (!vgpu_place_now(&place)) /* no context: the driver reports the error */
        return DRIVER(cuMemAlloc_v2)(pointer, bytes);
    vgpu_tier_finish();
    CUdeviceptr made = 0;
    CUresult result;
    struct vgpu_tier_patience patience = vgpu_tier_patience();
    do {
        result = CUDA_ERROR_OUT_OF_MEMORY;
        if (charge_allocated(&placing)) {
            result = anywhere(&placing, &made);
            if (result != CUDA_SUCCESS)
                vgpu_uncharge(placing.allocated, bytes);
        }
    } while (result == CUDA_ERROR_OUT_OF_MEMORY && vgpu_tier_await(&patience));
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        vgpu_tell_refused(place.card, bytes);
    else if (result == CUDA_SUCCESS)
        *pointer = made;
    vgpu_look_after_loans(); /* this may be the program's last call for a long time */
    return result;
}

static CUresult try_host(CUdeviceptr *pointer, uint64_t bytes, const struct vgpu_place *place) {
    struct placing placing = {.place = place, .asked = bytes};
    if (!charge_allocated(&placing))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr made = 0;
    bool pushed;
    const CUresult result =
        vgpu_tier_enter_context(place->context, &pushed) ? on_host(&placing, &made) : CUDA_ERROR_INVALID_CONTEXT;
    vgpu_tier_leave_context(pushed);
    if (result == CUDA_SUCCESS)
        *pointer = made;
    else
        vgpu_uncharge(placing.allocated, bytes);
    return result;
}

CUresult vgpu_tier_on_host(CUdeviceptr *pointer, uint64_t bytes, const struct vgpu_place *place) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (vgpu_tier_mode() == VGPU_TIER_OFF || place->card == VGPU_CARD_UNLISTED)
        return result;
    struct vgpu_tier_patience patience = vgpu_tier_patience();
    do
        result = try_host(pointer, bytes, place);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && vgpu_tier_await(&patience));
    return result;
}
