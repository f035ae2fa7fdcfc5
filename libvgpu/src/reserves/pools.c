/* Charges memory pools by what they reserve. */
#define _GNU_SOURCE
#include "reserves/pools.h"

#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "base/spin.h"
#include "reserves/capture.h"

/* step to which drivers round a pool's growth; if the real step is smaller, part of the charge is given back
 * afterwards */
#define CHUNK (32ull << 20)
#define DEVICES_ASKED 64 /* number of devices whose default pools are compared with an unknown handle */

struct vgpu_pool {
    struct vgpu_pool *next;
    _Atomic(CUmemoryPool) handle; /* NULL: the memory of graphs */
    _Atomic CUdevice device;      /* the device of these graphs */
    unsigned launching;           /* graphs about to take or reuse memory of the pool: meanwhile none is given back */
    atomic_bool gone;             /* the program has destroyed the pool */
    atomic_uint leaving;          /* calls about to destroy the pool: the driver is not asked about it any more */
    atomic_uint trimming;         /* the library's own calls that trim the pool outside the lock */
    atomic_uint card;             /* may be VGPU_CARD_UNLISTED; for host memory `on_card` is false */
    atomic_bool on_card;
    atomic_bool special;  /* no other memory can replace its memory */
    vgpu_lock lock;       /* protects everything below */
    uint64_t charged;     /* sum of the parts */
    uint64_t pending;     /* the part for allocations under way */
    uint64_t promised;    /* unused reserve that is promised to allocations under way */
    uint64_t outstanding; /* allocated from the pool */
    struct {
        struct vgpu_ticket ticket; /* every lane releases its own charge */
        uint64_t bytes;
    } parts[VGPU_LANES];
};

static _Atomic(struct vgpu_pool *) pools; /* records are never freed but reused, because allocations point to them */
static vgpu_lock list_lock;
/* The pool that this thread trims: a driver may call the program back meanwhile. */
static __thread __attribute__((tls_model("initial-exec"))) struct vgpu_pool *trimmed;

void vgpu_pools_forget(void) {
    trimmed = NULL;
    atomic_store(&pools, NULL);
    atomic_store(&list_lock, 0);
}

static struct vgpu_pool *find_one(CUmemoryPool handle, CUdevice device) {
    struct vgpu_pool *pool = atomic_load_explicit(&pools, memory_order_acquire);
    while (pool && (pool->handle != handle || (!handle && pool->device != device) || pool->gone))
        pool = pool->next;
    return pool;
}

static struct vgpu_pool *find(CUmemoryPool handle) {
    return handle ? find_one(handle, -1) : NULL;
}

/* List lock held. Returns the record of a destroyed pool without any memory, or a new record; NULL: no memory. */
static struct vgpu_pool *vacant(void) {
    for (struct vgpu_pool *pool = atomic_load(&pools); pool; pool = pool->next) {
        if (!pool->gone || !vgpu_lock_try(&pool->lock))
            continue;
        bool unused = !pool->leaving && !pool->charged && !pool->pending && !pool->promised && !pool->outstanding;
        vgpu_lock_release(&pool->lock);
        if (unused)
            return pool;
    }
    struct vgpu_pool *pool = calloc(1, sizeof *pool);
    if (pool) {
        pool->gone = true;
        pool->next = atomic_load(&pools);
        atomic_store_explicit(&pools, pool, memory_order_release);
    }
    return pool;
}

/* Pool's lock held. Whether the driver may be asked about the pool. */
static bool is_there(const struct vgpu_pool *pool) {
    return !pool->gone && !pool->leaving;
}

static bool balance(struct vgpu_pool *pool);

/* `made`: the driver has just returned the handle, so an old record with it belongs to a destroyed pool. */
static struct vgpu_pool *add(CUmemoryPool handle, CUdevice device, bool special, bool made) {
    const unsigned card = device >= 0 ? vgpu_card_of_device(device) : VGPU_CARD_UNLISTED;
    vgpu_lock_take(&list_lock);
    struct vgpu_pool *pool = find_one(handle, device);
    if (pool && made) {
        vgpu_lock_take(&pool->lock);
        pool->gone = true;
        balance(pool);
        vgpu_lock_release(&pool->lock);
        pool = NULL;
    }
    if (!pool && (pool = vacant())) {
        pool->handle = handle;
        pool->device = device;
        pool->on_card = device >= 0;
        pool->special = special;
        pool->card = card;
        pool->gone = false; /* last: from now on other threads find it */
    }
    vgpu_lock_release(&list_lock);
    return pool;
}

static bool attribute(CUmemoryPool handle, CUmemPool_attribute which, uint64_t *value) {
    cuuint64_t answer = 0;
    if (!DRIVER(cuMemPoolGetAttribute) || DRIVER(cuMemPoolGetAttribute)(handle, which, &answer) != CUDA_SUCCESS)
        return false;
    *value = answer;
    return true;
}

static bool reserve_of(const struct vgpu_pool *pool, uint64_t *value) {
    cuuint64_t answer = 0;
    if (pool->handle)
        return attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, value);
    if (!DRIVER(cuDeviceGetGraphMemAttribute) ||
        DRIVER(cuDeviceGetGraphMemAttribute)(pool->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &answer) !=
            CUDA_SUCCESS)
        return false;
    *value = answer;
    return true;
}

/* Drivers before CUDA 13 do not tell where a pool is. A pool that the program did not make is then the default pool of
 * some device. */
static CUdevice device_of_default(CUmemoryPool handle, CUdevice otherwise) {
    CUmemoryPool candidate;
    for (CUdevice device = 0; DRIVER(cuDeviceGetDefaultMemPool) && device < DEVICES_ASKED; device++) {
        if (DRIVER(cuDeviceGetDefaultMemPool)(&candidate, device) != CUDA_SUCCESS)
            break;
        if (candidate == handle)
            return device;
    }
    return otherwise;
}

static bool is_managed(CUmemoryPool handle) {
    uint64_t type;
    return attribute(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) && type == CU_MEM_ALLOCATION_TYPE_MANAGED;
}

/* Managed memory moves between host and devices. It is charged to the allocating device, as with cuMemAllocManaged. */
static CUdevice device_of(CUmemoryPool handle, CUdevice here) {
    uint64_t type, where, id;
    if (!attribute(handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &where) ||
        !attribute(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) ||
        !attribute(handle, CU_MEMPOOL_ATTR_LOCATION_ID, &id))
        return device_of_default(handle, here);
    const CUmemLocation location = {.type = (CUmemLocationType)where, .id = (int)id};
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED && where != CU_MEM_LOCATION_TYPE_DEVICE)
        return here;
    if (!vgpu_location_is_known(&location)) /* the driver cannot say: charge the calling device */
        return device_of_default(handle, here);
    return vgpu_device_of_location(&location);
}

bool vgpu_pool_of(CUmemoryPool handle, const struct vgpu_place *place, struct vgpu_pool **out) {
    struct vgpu_pool *pool = find(handle);
    uint64_t reserved;
    *out = NULL;
    /* not a pool: the driver reports the error */
    if (!pool && attribute(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved)) {
        pool = add(handle, device_of(handle, place->device), is_managed(handle), false);
        if (!pool)
            return false;
    }
    *out = pool && pool->on_card ? pool : NULL;
    return true;
}

struct vgpu_pool *vgpu_pool_of_graphs(CUdevice device) {
    struct vgpu_pool *pool = find_one(NULL, device);
    return pool ? pool : add(NULL, device, false, false);
}

void vgpu_pool_made(CUmemoryPool handle, CUdevice device, bool special) {
    add(handle, device, special, true);
}

unsigned vgpu_pool_card(const struct vgpu_pool *pool) {
    return pool->card;
}

bool vgpu_pool_is_special(const struct vgpu_pool *pool) {
    return pool->special;
}

CUdevice vgpu_pool_device(CUmemoryPool handle) {
    const struct vgpu_pool *pool = find(handle);
    return !pool ? device_of(handle, VGPU_NO_DEVICE) : pool->on_card ? pool->device : VGPU_NO_DEVICE;
}

/* Requests that no pool can hold get no promise, so that sums stay in 64 bits. */
static uint64_t promise(uint64_t bytes) {
    return bytes < UINT64_C(1) << 48 ? bytes : 0;
}

static bool used_of(const struct vgpu_pool *pool, uint64_t *value) {
    return attribute(pool->handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, value);
}

/* The charge stands for the reserve: it is equal, or larger if the driver gave some back unnoticed. Then balance()
 * keeps what has been promised. This saves a driver call. */
uint64_t vgpu_pool_growth(struct vgpu_pool *pool, uint64_t bytes) {
    uint64_t used = 0, growth;
    vgpu_lock_take(&pool->lock);
    bool known = is_there(pool) && used_of(pool, &used);
    uint64_t held = pool->charged - pool->pending;
    uint64_t room = known && held > used && held - used > pool->promised ? held - used - pool->promised : 0;
    pool->promised += promise(bytes);
    vgpu_lock_release(&pool->lock);
    if (bytes <= room)
        return 0;
    return __builtin_add_overflow(bytes - room, CHUNK - 1, &growth) ? UINT64_MAX : growth & ~(CHUNK - 1);
}

void vgpu_pool_refused(struct vgpu_pool *pool, uint64_t bytes) {
    vgpu_lock_take(&pool->lock);
    pool->promised -= promise(bytes);
    vgpu_lock_release(&pool->lock);
}

/* Call the next two with the pool's lock held. */
static void add_part(struct vgpu_pool *pool, struct vgpu_ticket ticket, uint64_t bytes) {
    for (unsigned i = 0; i < VGPU_LANES; i++) {
        if (pool->parts[i].bytes == 0 || memcmp(&pool->parts[i].ticket, &ticket, sizeof ticket) == 0) {
            pool->parts[i].ticket = ticket;
            pool->parts[i].bytes += bytes;
            break;
        }
    }
    pool->charged += bytes;
    vgpu_count_kind(ticket.card, VGPU_KIND_POOL, (int64_t)bytes);
}

static void release_parts(struct vgpu_pool *pool, uint64_t bytes) {
    for (unsigned i = 0; i < VGPU_LANES && bytes; i++) {
        uint64_t part = pool->parts[i].bytes < bytes ? pool->parts[i].bytes : bytes;
        if (!part)
            continue;
        vgpu_release(pool->parts[i].ticket, part);
        vgpu_count_kind(pool->parts[i].ticket.card, VGPU_KIND_POOL, -(int64_t)part);
        pool->parts[i].bytes -= part;
        pool->charged -= part;
        bytes -= part;
    }
}

/* Sets the charge to the reserve plus what is expected; false: it would exceed the limit. */
static bool balance(struct vgpu_pool *pool) {
    uint64_t reserved;
    if (pool->leaving && !pool->gone)
        return true; /* the destroying call does this after the driver's answer */
    if (pool->gone)  /* its memory is freed at once, with the last allocation */
        reserved = pool->outstanding ? pool->charged - pool->pending : 0;
    else if (!reserve_of(pool, &reserved))
        reserved = pool->outstanding;
    if (pool->charged > reserved + pool->pending) {
        uint64_t used, keep = reserved;
        if (pool->launching)
            return true;
        if (pool->promised && is_there(pool) && used_of(pool, &used) && used + pool->promised > reserved)
            keep = (used + pool->promised + CHUNK - 1) & ~(CHUNK - 1);
        if (pool->charged > keep + pool->pending)
            release_parts(pool, pool->charged - keep - pool->pending);
    } else if (pool->charged < reserved) {
        struct vgpu_ticket ticket;
        uint64_t growth = reserved - pool->charged;
        if (!vgpu_charge(pool->card, VGPU_DEVICE_BYTES, growth, &ticket))
            return false;
        add_part(pool, ticket, growth);
    }
    return true;
}

void vgpu_pool_expect(struct vgpu_pool *pool, struct vgpu_ticket ticket, uint64_t growth) {
    vgpu_lock_take(&pool->lock);
    add_part(pool, ticket, growth);
    pool->pending += growth;
    vgpu_lock_release(&pool->lock);
}

uint64_t vgpu_pool_enter(struct vgpu_pool *pool) {
    vgpu_lock_take(&pool->lock);
    balance(pool);
    pool->launching++;
    uint64_t charged = pool->charged;
    vgpu_lock_release(&pool->lock);
    return charged;
}

void vgpu_pool_leave(struct vgpu_pool *pool, uint64_t expected) {
    uint64_t reserved;
    vgpu_lock_take(&pool->lock);
    pool->pending -= expected;
    pool->launching--;
    if (!balance(pool) && reserve_of(pool, &reserved) && reserved > pool->charged) {
        struct vgpu_ticket ticket;
        vgpu_charge_always(pool->card, VGPU_DEVICE_BYTES, reserved - pool->charged, &ticket);
        add_part(pool, ticket, reserved - pool->charged);
    }
    vgpu_lock_release(&pool->lock);
}

bool vgpu_pool_settle(struct vgpu_pool *pool, uint64_t expected, uint64_t bytes, bool granted) {
    vgpu_lock_take(&pool->lock);
    pool->pending -= expected;
    pool->promised -= promise(bytes);
    pool->outstanding += granted ? bytes : 0;
    bool fits = balance(pool);
    vgpu_lock_release(&pool->lock);
    return fits;
}

void vgpu_pool_forget(struct vgpu_pool *pool, uint64_t bytes) {
    vgpu_lock_take(&pool->lock);
    pool->outstanding -= bytes < pool->outstanding ? bytes : pool->outstanding;
    if (pool->gone || pool->charged >= pool->outstanding + CHUNK) /* else the driver has no whole step to give back */
        balance(pool);
    vgpu_lock_release(&pool->lock);
}

struct vgpu_pool *vgpu_pool_going(CUmemoryPool handle) {
    vgpu_lock_take(&list_lock); /* else the record might be reused for another pool before it is counted */
    struct vgpu_pool *pool = find(handle);
    if (pool)
        atomic_fetch_add(&pool->leaving, 1);
    vgpu_lock_release(&list_lock);
    if (pool) { /* waits for threads that have not seen this */
        vgpu_lock_take(&pool->lock);
        vgpu_lock_release(&pool->lock);
        for (unsigned looks = 0; pool->trimming && trimmed != pool;)
            vgpu_yield(&looks);
    }
    return pool;
}

void vgpu_pool_went(struct vgpu_pool *pool, bool gone) {
    if (!pool)
        return;
    vgpu_lock_take(&pool->lock);
    if (gone)
        pool->gone = true;
    atomic_fetch_sub(&pool->leaving, 1);
    if (pool->on_card)
        balance(pool);
    vgpu_lock_release(&pool->lock);
}

void vgpu_pool_trimmed(CUmemoryPool handle) {
    struct vgpu_pool *pool = find(handle);
    if (pool && pool->on_card)
        vgpu_pool_settle(pool, 0, 0, false);
}

static __attribute__((noinline)) void settle_all(unsigned card) {
    for (struct vgpu_pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next) {
        if (pool->card != card || !pool->on_card || !vgpu_lock_try(&pool->lock))
            continue;
        balance(pool);
        vgpu_lock_release(&pool->lock);
    }
}

void vgpu_pools_settle(unsigned card) {
    if (atomic_load_explicit(&pools, memory_order_relaxed))
        settle_all(card);
}

/* Trims a pool to what it must keep for allocations under way. */
static void trim_to_needed(struct vgpu_pool *pool) {
    uint64_t used = 0;
    vgpu_lock_take(&pool->lock);
    const bool there = is_there(pool);
    const CUmemoryPool handle = pool->handle;
    const uint64_t keep = there && pool->promised && used_of(pool, &used) ? used + pool->promised : 0;
    atomic_fetch_add(&pool->trimming, there);
    vgpu_lock_release(&pool->lock);
    if (!there)
        return;
    struct vgpu_pool *before = trimmed;
    trimmed = pool;
    DRIVER(cuMemPoolTrimTo)(handle, keep);
    trimmed = before;
    atomic_fetch_sub(&pool->trimming, 1);
}

static void trim(struct vgpu_pool *pool) {
    if (pool->handle && DRIVER(cuMemPoolTrimTo))
        trim_to_needed(pool);
    else if (!pool->handle && !pool->launching && DRIVER(cuDeviceGraphMemTrim))
        DRIVER(cuDeviceGraphMemTrim)(pool->device);
}

bool vgpu_pools_give_back(unsigned card) {
    uint64_t before = vgpu_used(card, VGPU_DEVICE_BYTES);
    if (!atomic_load_explicit(&pools, memory_order_acquire))
        return false;
    for (struct vgpu_pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next)
        if (pool->card == card && pool->on_card && !pool->gone && !vgpu_any_capture())
            trim(pool);
    vgpu_pools_settle(card);
    return vgpu_used(card, VGPU_DEVICE_BYTES) < before;
}
