/* Linear memory, arrays and host memory. */
#define _GNU_SOURCE
#include "handles.h"

/* `pointer` is read after the call that writes it. */
CUresult keep_pointer(CUresult result, unsigned slot, const CUdeviceptr *pointer) {
    if (result == CUDA_SUCCESS)
        made(POINTER, slot, *pointer, 0);
    return result;
}

static CUresult looked_up(const char *name, int version, void **function) {
    CUdriverProcAddressQueryResult status;
    CUresult result = cuGetProcAddress_v2(name, function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    return result != CUDA_SUCCESS ? result : *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult allocate(struct operation op, bool looked) {
    CUdeviceptr pointer = 0;
    uint64_t bytes = bytes_of(op.b, card_here());
    if (op.c == 255)
        return cuMemAlloc_v2(NULL, bytes);
    if (!looked)
        return keep_pointer(cuMemAlloc_v2(&pointer, bytes), op.a, &pointer);
    void *function = NULL;
    CUresult result = looked_up("cuMemAlloc", op.c & 1 ? 12000 : 3020, &function);
    return result ? result
                  : keep_pointer(((CUresult (*)(CUdeviceptr *, size_t))function)(&pointer, bytes), op.a, &pointer);
}

CUresult allocate_other(struct operation op, unsigned which) {
    CUdeviceptr pointer = 0;
    CUdeviceptr_v1 narrow = 0;
    size_t pitch = 0;
    uint64_t bytes = bytes_of(op.b, card_here());
    switch (which) {
    case 0: return cuMemAlloc(&narrow, (unsigned)bytes);
    case 1:
        if (op.c >= 250)
            return cuMemAllocPitch_v2(op.c & 1 ? NULL : &pointer, op.c & 1 ? &pitch : NULL, bytes, 3, 4);
        return keep_pointer(cuMemAllocPitch_v2(&pointer, &pitch, bytes, op.c % 9u, 4u << (op.c >> 4) % 4), op.a,
                            &pointer);
    default: return keep_pointer(cuMemAllocManaged(op.c == 255 ? NULL : &pointer, bytes, op.c % 4u), op.a, &pointer);
    }
}

CUresult free_pointer(struct operation op, unsigned which) {
    CUdeviceptr pointer = handle_of(POINTER, op.a);
    /* a second free beside other threads may hit a block that one of them was just given */
    if (concurrent && op.a < 250)
        pointer = atomic_exchange(&slots[POINTER][op.a % SLOTS], 0);
    if (op.b >= 250)
        pointer = handle_of(op.b == 250 ? HOST : op.b == 251 ? ARRAY : op.b == 252 ? RANGE : PHYSICAL, op.a);
    else if (op.b >= 240)
        pointer += 512; /* inside a block */
    void *function = NULL;
    CUresult result;
    switch (which) {
    case 0: return cuMemFree_v2(pointer);
    case 1: return cuMemFreeAsync(pointer, stream_of(op.c));
    case 2: return cuMemFreeAsync_ptsz(pointer, stream_of(op.c));
    case 3: return cuMemFree((CUdeviceptr_v1)pointer);
    default:
        result = looked_up("cuMemFree", 12000, &function);
        return result ? result : ((CUresult (*)(CUdeviceptr))function)(pointer);
    }
}

CUresult array(struct operation op, unsigned which) {
    static const CUarray_format formats[] = {CU_AD_FORMAT_UNSIGNED_INT8, CU_AD_FORMAT_HALF,      CU_AD_FORMAT_FLOAT,
                                             CU_AD_FORMAT_SIGNED_INT32,  CU_AD_FORMAT_BC1_UNORM, CU_AD_FORMAT_NV12,
                                             (CUarray_format)0x77};
    static const unsigned flags[] = {0,
                                     0,
                                     CUDA_ARRAY3D_LAYERED,
                                     CUDA_ARRAY3D_CUBEMAP,
                                     CUDA_ARRAY3D_SURFACE_LDST,
                                     CUDA_ARRAY3D_SPARSE,
                                     CUDA_ARRAY3D_DEFERRED_MAPPING};
    size_t width = op.b == 255 ? SIZE_MAX / 2 : op.b * 97u, height = (op.c & 15) * 61u,
           depth = op.c >> 6 ? 6u * (op.c >> 6) : 0;
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = width,
                                    .Height = height,
                                    .Depth = depth,
                                    .Format = formats[op.c % 7u],
                                    .NumChannels = 1u << (op.b % 4u),
                                    .Flags = flags[(op.c >> 2) % 7u]};
    CUDA_ARRAY_DESCRIPTOR flat = {
        .Width = width, .Height = height, .Format = full.Format, .NumChannels = full.NumChannels};
    CUDA_ARRAY3D_DESCRIPTOR_v1 full1 = {.Width = (unsigned)width,
                                        .Height = (unsigned)height,
                                        .Depth = (unsigned)depth,
                                        .Format = full.Format,
                                        .NumChannels = full.NumChannels,
                                        .Flags = full.Flags};
    CUDA_ARRAY_DESCRIPTOR_v1 flat1 = {
        .Width = (unsigned)width, .Height = (unsigned)height, .Format = full.Format, .NumChannels = full.NumChannels};
    CUarray made_array = NULL;
    CUmipmappedArray mipmap = NULL;
    CUresult result;
    switch (which) {
    case 0: result = cuArrayCreate_v2(op.c == 255 ? NULL : &made_array, op.c == 254 ? NULL : &flat); break;
    case 1: result = cuArrayCreate(&made_array, op.c == 254 ? NULL : &flat1); break;
    case 2: result = cuArray3DCreate_v2(&made_array, op.c == 254 ? NULL : &full); break;
    case 3: result = cuArray3DCreate(op.c == 255 ? NULL : &made_array, &full1); break;
    case 4:
        result = cuMipmappedArrayCreate(op.c == 255 ? NULL : &mipmap, &full, op.a % 12u);
        if (result == CUDA_SUCCESS) {
            made(MIPMAP, op.a % 8u, (uintptr_t)mipmap, 0);
            if (cuMipmappedArrayGetLevel(&made_array, mipmap, 0) == CUDA_SUCCESS && op.a >= 128)
                atomic_store(&slots[ARRAY][op.a % 8u], (uintptr_t)made_array); /* no array to be destroyed */
        }
        return result;
    case 5: return cuArrayDestroy((CUarray)handle_of(ARRAY, op.a < 250 ? op.a % 8u : op.a));
    default: return cuMipmappedArrayDestroy((CUmipmappedArray)handle_of(MIPMAP, op.a < 250 ? op.a % 8u : op.a));
    }
    if (result == CUDA_SUCCESS)
        made(ARRAY, op.a % 8u, (uintptr_t)made_array, 0);
    return result;
}

CUresult host(struct operation op, unsigned which) {
    void *memory = (void *)handle_of(HOST, op.a);
    size_t free_bytes, total;
    unsigned narrow_free, narrow_total;
    CUresult result;
    switch (which) {
    case 0:
        result = cuMemHostAlloc(op.c == 255 ? NULL : &memory, bytes_of(op.b % 128u, 0), 0);
        if (result == CUDA_SUCCESS)
            made(HOST, op.a, (uintptr_t)memory, 0);
        return result;
    case 1: return cuMemFreeHost(memory);
    case 2:
        return op.c >= 250 ? cuMemGetInfo_v2(op.c & 1 ? NULL : &free_bytes, NULL)
                           : cuMemGetInfo_v2(&free_bytes, &total);
    case 3: return cuMemGetInfo(&narrow_free, &narrow_total);
    case 4:
        return op.c & 1 ? cuDeviceTotalMem_v2(op.c == 255 ? NULL : &total, op.b % (DEVICES + 1))
                        : cuDeviceTotalMem(&narrow_total, op.b);
    default: world_set_limit(op.a % LIMITED, (uint64_t)op.b * 8 * MIB + op.c); return CUDA_SUCCESS;
    }
}
