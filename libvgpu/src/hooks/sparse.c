/* Sparse arrays have no memory of their own, but memory mapped into them stays on its card after its handle is
 * released. */
#define _GNU_SOURCE
#include "hooks/sparse.h"

#include <stdlib.h>
#include <string.h>

#include "hooks/vmm.h"

#define BUCKETS 256u

/* What one operation has mapped into an array; protected by the lock of blocks. */
struct tiles {
    struct tiles *next;
    const void *array; /* or mipmapped array */
    CUcontext context; /* the context with which the array is destroyed; NULL: unknown, so the record stays */
    CUarrayMapInfo where;
    struct vgpu_block *block;
};

/* The context in which a sparse array was made; protected by the lock of blocks. */
struct home {
    struct home *next;
    const void *array;
    CUcontext context;
};

static struct tiles *mapped[BUCKETS];
static struct home *homes[BUCKETS];
static atomic_uint known; /* records in both tables */

void vgpu_sparse_forget(void) {
    memset(mapped, 0, sizeof mapped);
    memset(homes, 0, sizeof homes);
    atomic_store(&known, 0);
}

static unsigned bucket_of(const void *array) {
    return (unsigned)(((uintptr_t)array * 0x9e3779b97f4a7c15ull) >> 56);
}

static bool within(uint64_t inner, uint64_t size, uint64_t outer, uint64_t outer_size) {
    return inner >= outer && inner + size <= outer + outer_size;
}

/* True if an operation on `outer` replaces everything that was mapped at `inner`. */
static bool covers(const CUarrayMapInfo *outer, const CUarrayMapInfo *inner) {
    if (outer->subresourceType != inner->subresourceType)
        return false;
    if (outer->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL)
        return outer->subresource.miptail.layer == inner->subresource.miptail.layer &&
               within(inner->subresource.miptail.offset, inner->subresource.miptail.size,
                      outer->subresource.miptail.offset, outer->subresource.miptail.size);
    const __typeof__(outer->subresource.sparseLevel) *o = &outer->subresource.sparseLevel,
                                                     *i = &inner->subresource.sparseLevel;
    return o->level == i->level && o->layer == i->layer &&
           within(i->offsetX, i->extentWidth, o->offsetX, o->extentWidth) &&
           within(i->offsetY, i->extentHeight, o->offsetY, o->extentHeight) &&
           within(i->offsetZ, i->extentDepth, o->offsetZ, o->extentDepth);
}

/* Lock of blocks held. Releases, in one bucket, what is mapped into an array, or (NULL) into all arrays of a context.
 * Only what `where` covers (NULL: everything). */
static void let_go(struct tiles **at, const void *array, CUcontext context, const CUarrayMapInfo *where) {
    while (*at) {
        struct tiles *tiles = *at;
        if ((array ? tiles->array != array : tiles->context != context) || (where && !covers(where, &tiles->where))) {
            at = &tiles->next;
            continue;
        }
        *at = tiles->next;
        atomic_fetch_sub(&known, 1);
        vgpu_block_drop(tiles->block);
        free(tiles);
    }
}

/* Lock of blocks held. The same for the homes in one bucket. */
static void leave_home(struct home **at, const void *array, CUcontext context) {
    while (*at) {
        struct home *home = *at;
        if (array ? home->array != array : home->context != context) {
            at = &home->next;
            continue;
        }
        *at = home->next;
        atomic_fetch_sub(&known, 1);
        free(home);
    }
}

/* If there is no memory for the record, mapped memory stays charged until it is unmapped or the array is destroyed. */
void vgpu_sparse_made(const void *array) {
    struct vgpu_place place;
    if (vgpu_enforcement() == VGPU_UNLIMITED || !vgpu_place_now(&place))
        return;
    struct home *home = malloc(sizeof *home), **bucket = &homes[bucket_of(array)];
    vgpu_blocks_lock();
    leave_home(bucket, array, NULL);
    if (home) {
        *home = (struct home){.next = *bucket, .array = array, .context = place.context};
        *bucket = home;
        atomic_fetch_add(&known, 1);
    }
    vgpu_blocks_unlock();
}

static CUcontext home_of(const void *array) {
    const struct home *home = homes[bucket_of(array)];
    while (home && home->array != array)
        home = home->next;
    return home ? home->context : NULL;
}

bool vgpu_sparse_going(void) {
    vgpu_own_tables();
    if (!atomic_load(&known))
        return false;
    vgpu_blocks_lock();
    return true;
}

void vgpu_sparse_gone(bool going, bool gone, const void *array, CUcontext context) {
    if (!going)
        return;
    for (unsigned i = 0; gone && i < BUCKETS; i++) {
        let_go(&mapped[i], array, context, NULL);
        leave_home(&homes[i], array, context);
    }
    vgpu_blocks_unlock();
}

static const void *array_of(const CUarrayMapInfo *info) {
    return info->resourceType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY ? (const void *)info->resource.mipmap
                                                                  : (const void *)info->resource.array;
}

/* Lock of blocks held. Keeps the mapped memory on its card's account, and releases what it replaces. */
static void book(const CUarrayMapInfo *info, struct tiles *record) {
    struct vgpu_link *link =
        info->memOperationType == CU_MEM_OPERATION_TYPE_MAP ? vgpu_block_handle(info->memHandle.memHandle) : NULL;
    if (link)
        link->block->references++; /* first, because it may be the memory that is replaced */
    struct tiles **bucket = &mapped[bucket_of(array_of(info))];
    let_go(bucket, array_of(info), NULL, info);
    if (!link) {
        free(record);
        return;
    }
    *record = (struct tiles){.next = *bucket,
                             .array = array_of(info),
                             .context = home_of(array_of(info)),
                             .where = *info,
                             .block = link->block};
    *bucket = record;
    atomic_fetch_add(&known, 1);
}

typedef CUresult (*map_function)(CUarrayMapInfo *, unsigned, CUstream);

static CUresult map(map_function real, CUarrayMapInfo *list, unsigned count, CUstream stream) {
    if (!list || !count || vgpu_enforcement() == VGPU_UNLIMITED)
        return real(list, count, stream);
    /* a copy, because another thread may change the list meanwhile */
    CUarrayMapInfo *copy = calloc(count, sizeof *copy);
    struct tiles **records = calloc(count, sizeof *records);
    bool room = copy && records;
    for (unsigned i = 0; room && i < count; i++)
        room = (records[i] = malloc(sizeof **records)) != NULL;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (room) {
        memcpy(copy, list, count * sizeof *copy);
        vgpu_blocks_lock();
        result = real(copy, count, stream);
        for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
            book(&copy[i], records[i]);
            records[i] = NULL;
        }
        vgpu_blocks_unlock();
    }
    for (unsigned i = 0; records && i < count; i++)
        free(records[i]);
    free(records);
    free(copy);
    return result;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUDA_REAL(cuMemMapArrayAsync);
    return map(real, list, count, stream);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUDA_REAL(cuMemMapArrayAsync_ptsz);
    return map(real, list, count, stream);
}
