/* Pointers of the tier look like pointers to the card's memory, wherever the memory lies. Operations that are
 * impossible on them are refused with a log message. */
#define _GNU_SOURCE
#include <string.h>

#include "base/log.h"
#include "gate/gate.h"
#include "hooks/vmm.h"
#include "ledger/charge.h"
#include "tier/tier.h"

/* What the hooks report of a block. */
struct seen {
    CUdeviceptr base;
    uint64_t bytes;
    CUcontext context;
    CUdevice device;
    unsigned long long buffer;
    bool spilled; /* the program has mapped it itself: only the place differs from the driver's answer */
};

/* False: the driver's own answers are right. If true, call `done` later: until then a block of the tier does not
 * move. */
static bool see(CUdeviceptr address, struct seen *seen) {
    if (vgpu_tier_maybe(address)) {
        vgpu_tier_lock();
        const uint32_t number = vgpu_tier_around(address);
        const struct vgpu_tier_record *record = number == VGPU_TIER_NONE ? NULL : vgpu_tier_record(number);
        if (record && address - record->base < record->asked) {
            *seen = (struct seen){.base = record->base,
                                  .bytes = record->asked,
                                  .context = record->context,
                                  .device = record->device,
                                  .buffer = record->buffer_id};
            return true;
        }
        vgpu_tier_unlock();
    }
    if (!atomic_load_explicit(&vgpu_blocks_spilled, memory_order_relaxed))
        return false;
    vgpu_blocks_lock();
    const struct vgpu_link *mapping = vgpu_block_around(address);
    const bool found = mapping && mapping->block->spilled;
    if (found)
        *seen = (struct seen){.device = mapping->block->device, .spilled = true};
    vgpu_blocks_unlock();
    return found;
}

static void done(const struct seen *seen) {
    if (!seen->spilled)
        vgpu_tier_unlock();
}

static inline bool any(CUdeviceptr address) {
    return vgpu_tier_maybe(address) ||
           __builtin_expect(atomic_load_explicit(&vgpu_blocks_spilled, memory_order_relaxed) != 0, 0);
}

/* Writes the reported value; false: the driver's answer is right. Sizes as in cuda.h, CUpointer_attribute. */
static bool told(const struct seen *seen, CUpointer_attribute attribute, CUdeviceptr address, void *out) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = CU_MEMORYTYPE_DEVICE; return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = seen->device; return true;
    /* no: a registration would fix the block in its place */
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)out = 0; return true;
    default: break;
    }
    if (seen->spilled)
        return false;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = seen->context; return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = address; return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = seen->buffer; return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)out = 0; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)out = seen->base; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = seen->bytes; return true;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = 0; return true;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(int *)out = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE; return true;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)out = NULL; return true;
    default: return false;
    }
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    CUDA_REAL(cuPointerGetAttribute);
    struct seen seen;
    if (!any(address) || !out || !see(address, &seen))
        return real(out, attribute, address);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_POINTER_ATTRIBUTE_HOST_POINTER) /* an error, as for memory of the card */
        result = told(&seen, attribute, address, out) ? CUDA_SUCCESS : real(out, attribute, address);
    done(&seen);
    return result;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address) {
    CUDA_REAL(cuPointerGetAttributes);
    struct seen seen;
    if (!any(address) || !see(address, &seen))
        return real(count, attributes, data, address);
    const CUresult result = real(count, attributes, data, address);
    for (unsigned i = 0; result == CUDA_SUCCESS && i < count; i++) {
        if (attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER)
            *(void **)data[i] = NULL;
        else
            told(&seen, attributes[i], address, data[i]);
    }
    done(&seen);
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    CUDA_REAL(cuMemGetAddressRange_v2);
    struct seen seen;
    if (!any(address) || !see(address, &seen) || seen.spilled)
        return real(base, bytes, address);
    if (base)
        *base = seen.base;
    if (bytes)
        *bytes = seen.bytes;
    done(&seen);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *bytes, CUdeviceptr_v1 address) {
    CUDA_REAL(cuMemGetAddressRange);
    return real(base, bytes, address); /* addresses of the tier do not fit into 32 bits */
}

/* Whether a block of the tier is at this address. */
static bool tiered(CUdeviceptr address, bool *on_device) {
    if (!vgpu_tier_maybe(address))
        return false;
    vgpu_tier_lock();
    const uint32_t number = vgpu_tier_around(address);
    if (number != VGPU_TIER_NONE)
        *on_device = vgpu_tier_record(number)->on_device;
    vgpu_tier_unlock();
    return number != VGPU_TIER_NONE;
}

/* Whether the tier calls this a pointer of the card: then it is no host pointer, even if the memory lies on the
 * host. */
static bool is_of_card(const void *address) {
    bool on_device;
    return tiered((CUdeviceptr)(uintptr_t)address, &on_device);
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *address) {
    CUDA_REAL(cuMemHostGetFlags);
    return is_of_card(address) ? CUDA_ERROR_INVALID_VALUE : real(flags, address);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *address, unsigned int flags) {
    CUDA_REAL(cuMemHostGetDevicePointer_v2);
    return is_of_card(address) ? CUDA_ERROR_INVALID_VALUE : real(pointer, address, flags);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *pointer, void *address, unsigned int flags) {
    CUDA_REAL(cuMemHostGetDevicePointer);
    return is_of_card(address) ? CUDA_ERROR_INVALID_VALUE : real(pointer, address, flags);
}

CUresult cuMemFreeHost(void *address) {
    CUDA_REAL(cuMemFreeHost);
    return is_of_card(address) ? CUDA_ERROR_INVALID_VALUE : real(address);
}

/* Drivers give such handles only for memory of cuMemAlloc. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    CUDA_REAL(cuIpcGetMemHandle);
    bool on_device;
    if (!handle || !tiered(address, &on_device))
        return real(handle, address);
    const char *moves = vgpu_tier_mode() == VGPU_TIER_MOVABLE
                            ? "may move to host memory"
                            : "came up from host memory, and stays what it was made as";
    vgpu_log(VGPU_LOG_ERROR,
             "no IPC handle for %#llx: the block %s; vgpu.io/oversubscribe: \"false\" of the pod, or vgpu run without "
             "--oversubscribe, keeps all memory "
             "on the card",
             (unsigned long long)address, on_device ? moves : "lies in host memory");
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
                                       unsigned long long flags) {
    CUDA_REAL(cuMemGetHandleForAddressRange);
    if (!handle || vgpu_tier_show(address))
        return real(handle, address, bytes, type, flags);
    vgpu_log(VGPU_LOG_ERROR, "no handle for the range at %#llx: the block lies in host memory",
             (unsigned long long)address);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* An attribute of an address (for example synchronous copies) belongs to the memory that is mapped there now. */
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    CUDA_REAL(cuPointerSetAttribute);
    if (!vgpu_gate_is_armed())
        return real(value, attribute, address);
    vgpu_tier_hold(address);
    vgpu_gate_enter();
    const CUresult result = real(value, attribute, address);
    vgpu_gate_leave();
    return result;
}
