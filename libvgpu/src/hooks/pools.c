/* Stream-ordered allocation and the pools behind it. */
#define _GNU_SOURCE
#include "pools.h"

#include "capture.h"
#include "charge.h"

typedef CUresult (*allocate_function)(CUdeviceptr *, size_t, CUstream);
typedef CUresult (*allocate_from_function)(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult (*free_function)(CUdeviceptr, CUstream);

/* The stream that a per-thread entry point means by 0. */
static CUstream per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

static struct vgpu_pool *pool_for(CUstream stream, CUmemoryPool handle) {
    struct vgpu_place place;
    if (!vgpu_place_of_stream(stream, &place))
        return NULL;
    if (!handle && (!DRIVER(cuDeviceGetMemPool) || DRIVER(cuDeviceGetMemPool)(&handle, place.device) != CUDA_SUCCESS))
        return NULL;
    return vgpu_pool_of(handle, &place);
}

/* `stream` is the one that the driver will use, `given` what the program passed on. */
static CUresult allocate(allocate_function plain, allocate_from_function from, CUdeviceptr *pointer, size_t bytes, CUmemoryPool handle,
                         CUstream given, CUstream stream) {
    struct vgpu_pool *pool = NULL;
    /* A captured allocation is a node of a graph and takes nothing now. */
    if (pointer && bytes && (plain || handle) && vgpu_enforcement() != VGPU_UNLIMITED && !vgpu_capturing(stream))
        pool = pool_for(stream, handle);
    struct vgpu_ticket ticket;
    uint64_t growth = pool ? vgpu_pool_growth(pool, bytes) : 0, expected = 0;
    if (pool && (growth || vgpu_enforcement() == VGPU_BROKEN)) {
        enum vgpu_verdict verdict = vgpu_reserve(vgpu_pool_card(pool), growth, &ticket);
        if (verdict == VGPU_REFUSED) {
            vgpu_pool_refused(pool, bytes);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (verdict == VGPU_CHARGED) {
            expected = growth;
            vgpu_pool_expect(pool, ticket, growth);
        }
    }
    CUresult result = from ? from(pointer, bytes, handle, given) : plain(pointer, bytes, given);
    if (!pool)
        return result;
    bool fits = vgpu_pool_settle(pool, expected, bytes, result == CUDA_SUCCESS);
    if (result != CUDA_SUCCESS)
        return result;
    struct vgpu_holding holding = {.bytes = bytes, .owner = pool, .kind = VGPU_KIND_POOL, .payer = VGPU_PAID_BY_POOL};
    if (fits && vgpu_hold(VGPU_POINTER, *pointer, &holding))
        return result;
    if (DRIVER(cuMemFreeAsync))
        DRIVER(cuMemFreeAsync)(*pointer, stream);
    vgpu_pool_forget(pool, bytes);
    vgpu_pools_give_back(vgpu_pool_card(pool));
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CUDA_REAL(cuMemAllocAsync);
    return allocate(real, NULL, pointer, bytes, NULL, stream, stream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CUDA_REAL(cuMemAllocAsync_ptsz);
    return allocate(real, NULL, pointer, bytes, NULL, stream, per_thread(stream));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    CUDA_REAL(cuMemAllocFromPoolAsync);
    return allocate(NULL, real, pointer, bytes, pool, stream, stream);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    CUDA_REAL(cuMemAllocFromPoolAsync_ptsz);
    return allocate(NULL, real, pointer, bytes, pool, stream, per_thread(stream));
}

static CUresult release(free_function real, CUdeviceptr pointer, CUstream given, CUstream stream) {
    struct vgpu_freeing freeing;
    bool known = !vgpu_capturing(stream) && vgpu_freeing(VGPU_POINTER, pointer, &freeing);
    return vgpu_freed(real(pointer, given), VGPU_POINTER, pointer, known, &freeing);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    CUDA_REAL(cuMemFreeAsync);
    return release(real, pointer, stream, stream);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    CUDA_REAL(cuMemFreeAsync_ptsz);
    return release(real, pointer, stream, per_thread(stream));
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    CUDA_REAL(cuMemPoolCreate);
    CUresult result = real(pool, properties);
    if (result == CUDA_SUCCESS && vgpu_enforcement() != VGPU_UNLIMITED)
        vgpu_pool_made(*pool, properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? properties->location.id : -1);
    return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUDA_REAL(cuMemPoolDestroy);
    CUresult result = real(pool);
    vgpu_own_tables();
    if (result == CUDA_SUCCESS)
        vgpu_pool_destroyed(pool);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    CUDA_REAL(cuMemPoolTrimTo);
    CUresult result = real(pool, keep);
    if (result == CUDA_SUCCESS)
        vgpu_pool_trimmed(pool);
    return result;
}
