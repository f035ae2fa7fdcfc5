/* Stream-ordered allocation and the pools behind it. */
#define _GNU_SOURCE
#include "reserves/pools.h"

#include "ledger/charge.h"
#include "reserves/capture.h"
#include "tier/tier.h"

typedef CUresult (*allocate_function)(CUdeviceptr *, size_t, CUstream);
typedef CUresult (*allocate_from_function)(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult (*free_function)(CUdeviceptr, CUstream);

/* The stream that 0 means for a per-thread entry point. */
static CUstream per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/* Finds the pool of an allocation, in `pool` (NULL: no pool that is charged), and its handle. Any result but
 * CUDA_SUCCESS is the hook's answer. */
static CUresult pool_for(CUstream stream, CUmemoryPool *handle, struct vgpu_pool **pool, struct vgpu_place *place) {
    *pool = NULL;
    if (!vgpu_place_of_stream(stream, place)) {
        /* No current context, so a default stream is invalid. Any other stream may still be created before the driver
         * looks. */
        bool usual = !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
        __typeof__(&cuStreamGetCtx) ask = DRIVER(cuStreamGetCtx);
        CUcontext context;
        const CUresult why = usual || !ask ? CUDA_SUCCESS : ask(stream, &context);
        return usual || why != CUDA_SUCCESS ? why : CUDA_ERROR_INVALID_HANDLE;
    }
    if (!*handle && (!DRIVER(cuDeviceGetMemPool) || DRIVER(cuDeviceGetMemPool)(handle, place->device) != CUDA_SUCCESS))
        return CUDA_SUCCESS;
    return vgpu_pool_of(*handle, place, pool) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Charges the growth of a pool. For large allocations, pools leave the headroom of large blocks free. For small
 * allocations, which would otherwise stay in host memory, blocks move away if they can now. */
static enum vgpu_verdict reserve(const struct vgpu_pool *pool, uint64_t growth, uint64_t bytes,
                                 struct vgpu_ticket *ticket) {
    const unsigned card = vgpu_pool_card(pool);
    if (vgpu_tier_mode() == VGPU_TIER_OFF || vgpu_pool_is_special(pool))
        return vgpu_reserve(card, growth, ticket);
    if (!vgpu_tier_is_large(bytes))
        return vgpu_reserve_quietly(card, growth, ticket);
    return vgpu_tier_charge_card(card, growth, vgpu_tier_headroom(card), ticket) ? VGPU_CHARGED : VGPU_REFUSED;
}

/* If the pool cannot grow. Memory of the tier exists at once, and is freed in stream order like pool memory. */
static CUresult elsewhere(CUdeviceptr *pointer, size_t bytes, const struct vgpu_pool *pool, CUstream stream,
                          const struct vgpu_place *place) {
    if (vgpu_tier_mode() == VGPU_TIER_OFF || vgpu_pool_is_special(pool))
        return CUDA_ERROR_OUT_OF_MEMORY;
    const bool here = vgpu_pool_card(pool) == place->card;
    if (here && vgpu_tier_take_back(pointer, bytes, stream, place))
        return CUDA_SUCCESS;
    const CUresult result = here ? vgpu_tier_on_host(pointer, bytes, place) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        vgpu_tell_refused(vgpu_pool_card(pool), bytes);
    return result;
}

/* `stream`: the stream that the driver will use; `given`: the stream that the program passed. Allocates by `from` in
 * the very pool that was charged: another thread may change the device's pool meanwhile. */
static CUresult charged(allocate_from_function from, CUdeviceptr *pointer, size_t bytes, struct vgpu_pool *pool,
                        CUmemoryPool handle, CUstream given, CUstream stream, const struct vgpu_place *place) {
    struct vgpu_ticket ticket;
    uint64_t growth = vgpu_pool_growth(pool, bytes), expected = 0;
    if (growth || vgpu_enforcement() == VGPU_BROKEN) {
        enum vgpu_verdict verdict = reserve(pool, growth, bytes, &ticket);
        if (verdict == VGPU_REFUSED) {
            vgpu_pool_refused(pool, bytes);
            return elsewhere(pointer, bytes, pool, stream, place);
        }
        if (verdict == VGPU_CHARGED) {
            expected = growth;
            vgpu_pool_expect(pool, ticket, growth);
        }
    }
    CUdeviceptr made = 0; /* the program sees it only after it has been booked */
    CUresult result = from(&made, bytes, handle, given);
    bool fits = vgpu_pool_settle(pool, expected, bytes, result == CUDA_SUCCESS);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return elsewhere(pointer, bytes, pool, stream, place);
    if (result != CUDA_SUCCESS)
        return result;
    struct vgpu_holding holding = {.bytes = bytes, .owner = pool, .kind = VGPU_KIND_POOL, .payer = VGPU_PAID_BY_POOL};
    if (fits && vgpu_hold(VGPU_POINTER, made, &holding)) {
        *pointer = made;
        return result;
    }
    if (DRIVER(cuMemFreeAsync))
        DRIVER(cuMemFreeAsync)(made, stream);
    vgpu_pool_forget(pool, bytes);
    vgpu_pools_give_back(vgpu_pool_card(pool));
    return fits ? CUDA_ERROR_OUT_OF_MEMORY : elsewhere(pointer, bytes, pool, stream, place);
}

/* `plain` NULL: allocate from the pool of that handle. */
static CUresult as_it_is(allocate_function plain, allocate_from_function from, CUdeviceptr *pointer, size_t bytes,
                         CUmemoryPool handle, CUstream given) {
    return plain ? plain(pointer, bytes, given) : from(pointer, bytes, handle, given);
}

static CUresult allocate(allocate_function plain, allocate_from_function from, CUdeviceptr *pointer, size_t bytes,
                         CUmemoryPool handle, CUstream given, CUstream stream) {
    struct vgpu_place place;
    struct vgpu_pool *pool;
    CUmemoryPool wanted = handle;
    if (!pointer || !bytes || (!plain && !handle) || vgpu_enforcement() == VGPU_UNLIMITED)
        return as_it_is(plain, from, pointer, bytes, handle, given);
    if (vgpu_recording(stream)) { /* becomes a node of a graph, which takes no memory now */
        CUresult result = as_it_is(plain, from, pointer, bytes, handle, given);
        vgpu_recorded();
        return result;
    }
    const CUresult found = pool_for(stream, &wanted, &pool, &place);
    if (found != CUDA_SUCCESS)
        return found;
    if (pool && !from) /* the driver cannot allocate from the very pool that would be charged */
        return CUDA_ERROR_OUT_OF_MEMORY;
    return pool ? charged(from, pointer, bytes, pool, wanted, given, stream, &place)
                : as_it_is(plain, from, pointer, bytes, handle, given);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CUDA_REAL(cuMemAllocAsync);
    return allocate(real, DRIVER(cuMemAllocFromPoolAsync), pointer, bytes, NULL, stream, stream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CUDA_REAL(cuMemAllocAsync_ptsz);
    return allocate(real, DRIVER(cuMemAllocFromPoolAsync_ptsz), pointer, bytes, NULL, stream, per_thread(stream));
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
    if (vgpu_recording(stream)) {
        CUresult result = real(pointer, given);
        vgpu_recorded();
        return result;
    }
    CUresult ours;
    if (vgpu_tier_maybe(pointer) && vgpu_tier_free_in_order(pointer, stream, &ours))
        return ours;
    bool known = vgpu_freeing(VGPU_POINTER, pointer, &freeing);
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

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *given) {
    CUDA_REAL(cuMemPoolCreate);
    if (!pool || !given || vgpu_enforcement() == VGPU_UNLIMITED)
        return real(pool, given);
    const CUmemPoolProps properties = *given;
    CUmemoryPool made = NULL;
    CUresult result = real(&made, &properties);
    if (result == CUDA_SUCCESS) {
        const CUdevice device = vgpu_device_of_location(&properties.location);
        const bool managed = properties.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED, bounded = properties.maxSize != 0;
        /* a managed pool may have no location (cuda.h, CU_MEM_LOCATION_TYPE_NONE) */
        const bool named = vgpu_location_is_known(&properties.location);
        if ((named && device != VGPU_NO_DEVICE) || !managed) /* the first allocation decides where managed memory is */
            vgpu_pool_made(made, device, managed || bounded || properties.handleTypes || properties.usage);
        *pool = made;
    }
    return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUDA_REAL(cuMemPoolDestroy);
    vgpu_own_tables();
    struct vgpu_pool *going = vgpu_pool_going(pool);
    CUresult result = real(pool);
    vgpu_pool_went(going, result == CUDA_SUCCESS);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    CUDA_REAL(cuMemPoolTrimTo);
    CUresult result = real(pool, keep);
    if (result == CUDA_SUCCESS)
        vgpu_pool_trimmed(pool);
    return result;
}
