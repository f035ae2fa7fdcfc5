/* Copies, and other calls that read ranges of memory. */
#define _GNU_SOURCE
#include "hooks/measured.h"
#include "ledger/cards.h"
#include "tier/blocks.h"
#include "tier/memory.h"

/* For copies between two contexts: besides the given stream, the driver may use the default streams of both. They are
 * noted after the driver has accepted the contexts; no thread asks for streams before this thread leaves the gate. */
#define BETWEEN(to, from) (vgpu_default_stream_used(to), vgpu_default_stream_used(from))

struct ends {
    CUcontext to, from;
};

static bool several_devices(void) {
    static atomic_int known;
    int count = atomic_load_explicit(&known, memory_order_relaxed);
    if (!count && DRIVER(cuDeviceGetCount) && DRIVER(cuDeviceGetCount)(&count) == CUDA_SUCCESS)
        atomic_store_explicit(&known, count, memory_order_relaxed);
    return count > 1;
}

/* Whether a block lies on a card that `here` cannot access. Also returns the context of any block. */
static bool out_of_reach(uint32_t number, CUdevice here, CUcontext *context) {
    const struct vgpu_tier_record *record = number == VGPU_TIER_NONE ? NULL : vgpu_tier_record(number);
    *context = record ? record->context : NULL;
    return record && record->on_device && record->device != here && !vgpu_tier_is_peer(here, record->device);
}

/* The context of memory that is no block; false: not memory of a card. */
static bool find_context(CUdeviceptr address, CUcontext here, CUcontext *context) {
    __typeof__(&cuPointerGetAttribute) ask = DRIVER(cuPointerGetAttribute);
    unsigned type = 0;
    if (*context)
        return true;
    if (!ask || ask(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE)
        return false;
    if (ask(context, CU_POINTER_ATTRIBUTE_CONTEXT, address) != CUDA_SUCCESS || !*context)
        *context = here;
    return true;
}

/* A copy that names no contexts reaches memory that the driver allocated on any card. But it reaches mapped memory only
 * if the stream's card may access it. NVIDIA's bug 3446335 says so of pools; a copy that names both contexts has no
 * such limit. True: name `ends`. */
static bool has_to_name_ends(CUdeviceptr to, CUdeviceptr from, CUstream stream, struct ends *ends) {
    const uint32_t there = vgpu_tier_find(to), here = vgpu_tier_find(from);
    struct vgpu_place place;
    if ((there == VGPU_TIER_NONE && here == VGPU_TIER_NONE) || !several_devices() ||
        !vgpu_place_of_stream(stream, &place))
        return false;
    const bool to_far = out_of_reach(there, place.device, &ends->to),
               from_far = out_of_reach(here, place.device, &ends->from);
    return (to_far || from_far) && find_context(to, place.context, &ends->to) &&
           find_context(from, place.context, &ends->from);
}

static CUresult copy_now(__typeof__(&cuMemcpy) real, __typeof__(&cuMemcpyPeer) between, CUdeviceptr to,
                         CUdeviceptr from, size_t bytes, CUstream stream) {
    struct ends ends;
    if (!between || !has_to_name_ends(to, from, stream, &ends))
        return real(to, from, bytes);
    BETWEEN(ends.to, ends.from);
    return between(to, ends.to, from, ends.from, bytes);
}

/* `stream`: the stream that the driver will use; `given`: the stream that the program passed. */
static CUresult copy_in_order(__typeof__(&cuMemcpyAsync) real, __typeof__(&cuMemcpyPeerAsync) between, CUdeviceptr to,
                              CUdeviceptr from, size_t bytes, CUstream given, CUstream stream) {
    struct ends ends;
    if (!between || !has_to_name_ends(to, from, stream, &ends))
        return real(to, from, bytes, given);
    BETWEEN(ends.to, ends.from);
    return between(to, ends.to, from, ends.from, bytes, given);
}

#define BETWEEN_CARDS(symbol, between, stream)                                                                         \
    MEASURED_CALLING(symbol, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), stream,              \
                     vgpu_copy_is_paced(to, from), vgpu_cost_key(&vgpu_copy_work, bytes, 0),                           \
                     copy_now(real, DRIVER(between), to, from, bytes, stream))
#define BETWEEN_CARDS_ASYNC(symbol, between, used)                                                                     \
    MEASURED_CALLING(symbol, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),                        \
                     (to, from, bytes, stream), used, vgpu_copy_is_paced(to, from),                                    \
                     vgpu_cost_key(&vgpu_copy_work, bytes, 0),                                                         \
                     copy_in_order(real, DRIVER(between), to, from, bytes, stream, used))

GATED(cuFabricCpyBatchAsync, (size_t count, CUDA_FABRIC_COPY_BATCH_OP *list, unsigned long long flags, CUstream stream),
      (count, list, flags, stream), stream)
GATED(cuFabricCpyBatchAsync_ptsz,
      (size_t count, CUDA_FABRIC_COPY_BATCH_OP *list, unsigned long long flags, CUstream stream),
      (count, list, flags, stream), per_thread(stream))
GATED(cuMemBatchDecompressAsync,
      (CUmemDecompressParams * list, size_t count, unsigned int flags, size_t *failed, CUstream stream),
      (list, count, flags, failed, stream), stream)
GATED(cuMemBatchDecompressAsync_ptsz,
      (CUmemDecompressParams * list, size_t count, unsigned int flags, size_t *failed, CUstream stream),
      (list, count, flags, failed, stream), per_thread(stream))
GATED(cuMemDiscardAndPrefetchBatchAsync,
      (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t location_count,
       unsigned long long flags, CUstream stream),
      (at, sizes, count, locations, indices, location_count, flags, stream), stream)
GATED(cuMemDiscardAndPrefetchBatchAsync_ptsz,
      (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t location_count,
       unsigned long long flags, CUstream stream),
      (at, sizes, count, locations, indices, location_count, flags, stream), per_thread(stream))
GATED(cuMemDiscardBatchAsync,
      (CUdeviceptr * at, size_t *sizes, size_t count, unsigned long long flags, CUstream stream),
      (at, sizes, count, flags, stream), stream)
GATED(cuMemDiscardBatchAsync_ptsz,
      (CUdeviceptr * at, size_t *sizes, size_t count, unsigned long long flags, CUstream stream),
      (at, sizes, count, flags, stream), per_thread(stream))
GATED(cuMemPrefetchAsync, (CUdeviceptr at, size_t count, CUdevice device, CUstream stream), (at, count, device, stream),
      stream)
GATED(cuMemPrefetchAsync_ptsz, (CUdeviceptr at, size_t count, CUdevice device, CUstream stream),
      (at, count, device, stream), per_thread(stream))
GATED(cuMemPrefetchAsync_v2,
      (CUdeviceptr at, size_t count, CUmemLocation location, unsigned int flags, CUstream stream),
      (at, count, location, flags, stream), stream)
GATED(cuMemPrefetchAsync_v2_ptsz,
      (CUdeviceptr at, size_t count, CUmemLocation location, unsigned int flags, CUstream stream),
      (at, count, location, flags, stream), per_thread(stream))
GATED(cuMemPrefetchBatchAsync,
      (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t location_count,
       unsigned long long flags, CUstream stream),
      (at, sizes, count, locations, indices, location_count, flags, stream), stream)
GATED(cuMemPrefetchBatchAsync_ptsz,
      (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t location_count,
       unsigned long long flags, CUstream stream),
      (at, sizes, count, locations, indices, location_count, flags, stream), per_thread(stream))
BETWEEN_CARDS(cuMemcpy, cuMemcpyPeer, CU_STREAM_LEGACY)
BETWEEN_CARDS(cuMemcpy_ptds, cuMemcpyPeer_ptds, CU_STREAM_PER_THREAD)
GATED(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *copy), (copy), CU_STREAM_PER_THREAD)
GATED(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *copy, CUstream stream), (copy, stream), stream)
GATED(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream), stream)
GATED(cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream), per_thread(stream))
GATED(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *copy), (copy), CU_STREAM_PER_THREAD)
GATED(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy), (copy), CU_STREAM_LEGACY)
GATED(cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *copy), (copy), CU_STREAM_PER_THREAD)
GATED(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *copy, CUstream stream), (copy, stream), stream)
GATED(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream), (copy, stream), stream)
GATED(cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D *copy, CUstream stream), (copy, stream), per_thread(stream))
GATED(cuMemcpy3DBatchAsync,
      (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, size_t *failed, unsigned long long flags, CUstream stream),
      (count, list, failed, flags, stream), stream)
GATED(cuMemcpy3DBatchAsync_ptsz,
      (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, size_t *failed, unsigned long long flags, CUstream stream),
      (count, list, failed, flags, stream), per_thread(stream))
GATED(cuMemcpy3DBatchAsync_v2, (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream stream),
      (count, list, flags, stream), stream)
GATED(cuMemcpy3DBatchAsync_v2_ptsz,
      (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream stream),
      (count, list, flags, stream), per_thread(stream))
GATED_NOTING(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *copy), (copy), CU_STREAM_LEGACY,
             BETWEEN(copy->dstContext, copy->srcContext))
GATED_NOTING(cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER *copy), (copy), CU_STREAM_PER_THREAD,
             BETWEEN(copy->dstContext, copy->srcContext))
GATED_NOTING(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), (copy, stream), stream,
             BETWEEN(copy->dstContext, copy->srcContext))
GATED_NOTING(cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), (copy, stream),
             per_thread(stream), BETWEEN(copy->dstContext, copy->srcContext))
GATED(cuMemcpy3DWithAttributesAsync, (CUDA_MEMCPY3D_BATCH_OP * list, unsigned long long flags, CUstream stream),
      (list, flags, stream), stream)
GATED(cuMemcpy3DWithAttributesAsync_ptsz, (CUDA_MEMCPY3D_BATCH_OP * list, unsigned long long flags, CUstream stream),
      (list, flags, stream), per_thread(stream))
BETWEEN_CARDS_ASYNC(cuMemcpyAsync, cuMemcpyPeerAsync, stream)
BETWEEN_CARDS_ASYNC(cuMemcpyAsync_ptsz, cuMemcpyPeerAsync_ptsz, per_thread(stream))
GATED(cuMemcpyAtoA, (CUarray to, unsigned int to_offset, CUarray from, unsigned int from_offset, unsigned int bytes),
      (to, to_offset, from, from_offset, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyAtoA_v2, (CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes),
      (to, to_offset, from, from_offset, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyAtoA_v2_ptds, (CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes),
      (to, to_offset, from, from_offset, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyAtoD, (CUdeviceptr_v1 to, CUarray from, unsigned int from_offset, unsigned int bytes),
      (to, from, from_offset, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyAtoD_v2, (CUdeviceptr to, CUarray from, size_t from_offset, size_t bytes), (to, from, from_offset, bytes),
      CU_STREAM_LEGACY)
GATED(cuMemcpyAtoD_v2_ptds, (CUdeviceptr to, CUarray from, size_t from_offset, size_t bytes),
      (to, from, from_offset, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyAtoH, (void *to, CUarray from, unsigned int from_offset, unsigned int bytes),
      (to, from, from_offset, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyAtoH_v2, (void *to, CUarray from, size_t from_offset, size_t bytes), (to, from, from_offset, bytes),
      CU_STREAM_LEGACY)
GATED(cuMemcpyAtoH_v2_ptds, (void *to, CUarray from, size_t from_offset, size_t bytes), (to, from, from_offset, bytes),
      CU_STREAM_PER_THREAD)
GATED(cuMemcpyAtoHAsync, (void *to, CUarray from, unsigned int from_offset, unsigned int bytes, CUstream stream),
      (to, from, from_offset, bytes, stream), stream)
GATED(cuMemcpyAtoHAsync_v2, (void *to, CUarray from, size_t from_offset, size_t bytes, CUstream stream),
      (to, from, from_offset, bytes, stream), stream)
GATED(cuMemcpyAtoHAsync_v2_ptsz, (void *to, CUarray from, size_t from_offset, size_t bytes, CUstream stream),
      (to, from, from_offset, bytes, stream), per_thread(stream))
GATED(cuMemcpyBatchAsync,
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *indices, size_t attribute_count, size_t *failed, CUstream stream),
      (to, from, sizes, count, attributes, indices, attribute_count, failed, stream), stream)
GATED(cuMemcpyBatchAsync_ptsz,
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *indices, size_t attribute_count, size_t *failed, CUstream stream),
      (to, from, sizes, count, attributes, indices, attribute_count, failed, stream), per_thread(stream))
GATED(cuMemcpyBatchAsync_v2,
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *indices, size_t attribute_count, CUstream stream),
      (to, from, sizes, count, attributes, indices, attribute_count, stream), stream)
GATED(cuMemcpyBatchAsync_v2_ptsz,
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *indices, size_t attribute_count, CUstream stream),
      (to, from, sizes, count, attributes, indices, attribute_count, stream), per_thread(stream))
GATED(cuMemcpyDtoA, (CUarray to, unsigned int to_offset, CUdeviceptr_v1 from, unsigned int bytes),
      (to, to_offset, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyDtoA_v2, (CUarray to, size_t to_offset, CUdeviceptr from, size_t bytes), (to, to_offset, from, bytes),
      CU_STREAM_LEGACY)
GATED(cuMemcpyDtoA_v2_ptds, (CUarray to, size_t to_offset, CUdeviceptr from, size_t bytes),
      (to, to_offset, from, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyDtoD, (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes), (to, from, bytes), CU_STREAM_LEGACY)
BETWEEN_CARDS(cuMemcpyDtoD_v2, cuMemcpyPeer, CU_STREAM_LEGACY)
BETWEEN_CARDS(cuMemcpyDtoD_v2_ptds, cuMemcpyPeer_ptds, CU_STREAM_PER_THREAD)
GATED(cuMemcpyDtoDAsync, (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream),
      (to, from, bytes, stream), stream)
BETWEEN_CARDS_ASYNC(cuMemcpyDtoDAsync_v2, cuMemcpyPeerAsync, stream)
BETWEEN_CARDS_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, cuMemcpyPeerAsync_ptsz, per_thread(stream))
GATED(cuMemcpyDtoH, (void *to, CUdeviceptr_v1 from, unsigned int bytes), (to, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyDtoHAsync, (void *to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream),
      (to, from, bytes, stream), stream)
GATED(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream),
      stream)
GATED(cuMemcpyDtoHAsync_v2_ptsz, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream),
      per_thread(stream))
GATED(cuMemcpyHtoA, (CUarray to, unsigned int to_offset, const void *from, unsigned int bytes),
      (to, to_offset, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyHtoA_v2, (CUarray to, size_t to_offset, const void *from, size_t bytes), (to, to_offset, from, bytes),
      CU_STREAM_LEGACY)
GATED(cuMemcpyHtoA_v2_ptds, (CUarray to, size_t to_offset, const void *from, size_t bytes),
      (to, to_offset, from, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyHtoAAsync, (CUarray to, unsigned int to_offset, const void *from, unsigned int bytes, CUstream stream),
      (to, to_offset, from, bytes, stream), stream)
GATED(cuMemcpyHtoAAsync_v2, (CUarray to, size_t to_offset, const void *from, size_t bytes, CUstream stream),
      (to, to_offset, from, bytes, stream), stream)
GATED(cuMemcpyHtoAAsync_v2_ptsz, (CUarray to, size_t to_offset, const void *from, size_t bytes, CUstream stream),
      (to, to_offset, from, bytes, stream), per_thread(stream))
GATED(cuMemcpyHtoD, (CUdeviceptr_v1 to, const void *from, unsigned int bytes), (to, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes), (to, from, bytes), CU_STREAM_LEGACY)
GATED(cuMemcpyHtoD_v2_ptds, (CUdeviceptr to, const void *from, size_t bytes), (to, from, bytes), CU_STREAM_PER_THREAD)
GATED(cuMemcpyHtoDAsync, (CUdeviceptr_v1 to, const void *from, unsigned int bytes, CUstream stream),
      (to, from, bytes, stream), stream)
GATED(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
      (to, from, bytes, stream), stream)
GATED(cuMemcpyHtoDAsync_v2_ptsz, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
      (to, from, bytes, stream), per_thread(stream))
GATED_NOTING(cuMemcpyPeer,
             (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
             (to, to_context, from, from_context, bytes), CU_STREAM_LEGACY, BETWEEN(to_context, from_context))
GATED_NOTING(cuMemcpyPeer_ptds,
             (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
             (to, to_context, from, from_context, bytes), CU_STREAM_PER_THREAD, BETWEEN(to_context, from_context))
GATED_NOTING(cuMemcpyPeerAsync,
             (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
              CUstream stream),
             (to, to_context, from, from_context, bytes, stream), stream, BETWEEN(to_context, from_context))
GATED_NOTING(cuMemcpyPeerAsync_ptsz,
             (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
              CUstream stream),
             (to, to_context, from, from_context, bytes, stream), per_thread(stream), BETWEEN(to_context, from_context))
GATED(cuMemcpyWithAttributesAsync,
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUmemcpyAttributes *attributes, CUstream stream),
      (to, from, size, attributes, stream), stream)
GATED(cuMemcpyWithAttributesAsync_ptsz,
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUmemcpyAttributes *attributes, CUstream stream),
      (to, from, size, attributes, stream), per_thread(stream))
