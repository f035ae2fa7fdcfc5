/* Blocks that a program makes without addresses, and what the hooks report of them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "hooks/vmm.h"
#include "tier/tier.h"

/* What cuMemCreate is about to make. */
struct making {
    __typeof__(&cuMemCreate) real;
    size_t bytes;
    CUmemAllocationProp properties;
    unsigned long long flags;
    unsigned card;
    struct vgpu_block *block;
    struct vgpu_link *link;
};

/* Calls the driver and books its result. `block` holds the charges, which are given back if the driver fails. */
static CUresult make(struct making *making, const CUmemAllocationProp *properties,
                     CUmemGenericAllocationHandle *handle) {
    CUmemGenericAllocationHandle made = 0;
    vgpu_blocks_lock();
    CUresult result = making->real(&made, making->bytes, properties, making->flags);
    if (result == CUDA_SUCCESS) {
        making->block->references = 1;
        *making->link = (struct vgpu_link){.key = made, .count = 1, .block = making->block};
        vgpu_block_add_handle(making->link);
        atomic_fetch_add(&vgpu_blocks_spilled, making->block->spilled);
        *handle = made;
    }
    vgpu_blocks_unlock();
    if (result == CUDA_SUCCESS)
        return result;
    vgpu_uncharge(making->block->ticket, making->bytes);
    if (making->block->spilled)
        vgpu_uncharge(making->block->where, making->bytes);
    return result;
}

static CUresult make_on_card(struct making *making, uint64_t spare, CUmemGenericAllocationHandle *handle) {
    *making->block =
        (struct vgpu_block){.charged = making->bytes, .device = vgpu_device_of_location(&making->properties.location)};
    return vgpu_tier_charge_card(making->card, making->bytes, spare, &making->block->ticket)
               ? make(making, &making->properties, handle)
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult make_on_host(struct making *making, CUmemGenericAllocationHandle *handle) {
    CUmemAllocationProp properties = making->properties;
    struct vgpu_block *block = making->block;
    *block = (struct vgpu_block){
        .charged = making->bytes, .device = vgpu_device_of_location(&properties.location), .spilled = true};
    if (!vgpu_tier_host_location(block->device, &properties.location) ||
        !vgpu_tier_charge_host(making->card, making->bytes, &block->ticket, &block->where))
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(&properties.allocFlags, 0, sizeof properties.allocFlags);
    return make(making, &properties, handle);
}

/* Whether the memory may lie anywhere. Memory that the program may export, or memory of a special kind, stays on the
 * card. */
static bool may_be_anywhere(const struct making *making) {
    return vgpu_tier_mode() != VGPU_TIER_OFF && !making->properties.requestedHandleTypes && !making->flags &&
           !making->properties.allocFlags.compressionType && !making->properties.allocFlags.gpuDirectRDMACapable &&
           !making->properties.allocFlags.usage;
}

static CUresult make_anywhere(struct making *making, CUmemGenericAllocationHandle *handle) {
    const uint64_t spare = vgpu_tier_headroom(making->card);
    CUresult result = make_on_card(making, spare, handle);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        result = make_on_host(making, handle);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && spare)
        result = make_on_card(making, 0, handle);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        vgpu_tell_refused(making->card, making->bytes);
    return result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *given,
                     unsigned long long flags) {
    CUDA_REAL(cuMemCreate);
    if (!handle || !given)
        return real(handle, bytes, given, flags);
    struct making making = {.real = real, .bytes = bytes, .properties = *given, .flags = flags};
    const CUdevice device = vgpu_device_of_location(&making.properties.location);
    /* Host memory (HOST, HOST_NUMA ...) is not the card's. The location names the card, not the current context. */
    if (!bytes || device == VGPU_NO_DEVICE || vgpu_enforcement() == VGPU_UNLIMITED ||
        (vgpu_enforcement() != VGPU_BROKEN && !vgpu_device_exists(device)))
        return real(handle, bytes, &making.properties, flags);
    making.card = vgpu_card_of_device(device);
    making.block = calloc(1, sizeof *making.block);
    making.link = calloc(1, sizeof *making.link);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (making.block && making.link && may_be_anywhere(&making)) {
        result = make_anywhere(&making, handle);
    } else if (making.block && making.link) {
        *making.block = (struct vgpu_block){.charged = bytes, .device = device};
        if (vgpu_reserve(making.card, bytes, &making.block->ticket) == VGPU_CHARGED)
            result = make(&making, &making.properties, handle);
    }
    if (result != CUDA_SUCCESS) {
        free(making.block);
        free(making.link);
    }
    return result;
}

/* Reports what the program asked for, wherever the memory lies. */
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    CUDA_REAL(cuMemGetAllocationPropertiesFromHandle);
    CUresult result = real(properties, handle);
    if (result != CUDA_SUCCESS || !properties || !atomic_load_explicit(&vgpu_blocks_spilled, memory_order_relaxed))
        return result;
    vgpu_blocks_lock();
    const struct vgpu_link *link = vgpu_block_handle(handle);
    if (link && link->block->spilled)
        properties->location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = link->block->device};
    vgpu_blocks_unlock();
    return result;
}
