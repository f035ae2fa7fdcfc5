/* The table of blocks: addresses, records, and their entries in each card's policy. */
#define _GNU_SOURCE
#include "tier/blocks.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "ledger/charge.h"
#include "reserves/capture.h"

#define ARENAS 256u
#define ARENA_BYTES (UINT64_C(1) << VGPU_TIER_LEAF_SHIFT)
#define LEAST_ARENA_BYTES (UINT64_C(1) << 30)
#define LEAF_ENTRIES (1u << (VGPU_TIER_LEAF_SHIFT - VGPU_TIER_SHIFT))
/* The driver counts buffers from 1; these numbers never collide with the driver's. */
#define FIRST_BUFFER (UINT64_C(1) << 48)

/* A reserved range of addresses; one bit per granule that belongs to a block. */
struct arena {
    CUdeviceptr base;
    uint64_t granules;
    uint64_t hint; /* below it, no granule is free */
    uint64_t *taken;
};

_Atomic(_Atomic uint32_t *) vgpu_tier_leaves[VGPU_TIER_LEAVES];
atomic_bool vgpu_tier_used;
atomic_uint vgpu_tier_pinned;

/* Weak: before glibc 2.34 these functions are in libpthread, and this library must not load libpthread into programs
 * without threads. */
#pragma weak pthread_mutex_trylock
#pragma weak pthread_setcancelstate
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread __attribute__((tls_model("initial-exec"))) unsigned locked; /* how often this thread holds the lock */
/* cancel state of the thread before it took the lock */
static __thread __attribute__((tls_model("initial-exec"))) int cancelled_before;

/* Protected by the lock, except `records`, which stays once set. */
static struct arena arenas[ARENAS];
static unsigned arena_count;
static _Atomic(struct vgpu_tier_record *) records;
static uint32_t high, vacant = VGPU_TIER_NONE;
static uint32_t *by_address; /* the pinned blocks, ordered by address */
static _Atomic uint64_t buffers = FIRST_BUFFER;
static _Atomic(struct vgpu_tier_card *) cards[VGPU_MAX_CARDS];

/* Delays cancellation: a thread cancelled in the middle of a move would leave the lock and the gate closed forever. */
static void cancel_later(void) {
    if (pthread_setcancelstate)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled_before);
}

static void cancel_as_before(void) {
    int disabled;
    if (pthread_setcancelstate)
        pthread_setcancelstate(cancelled_before, &disabled);
}

void vgpu_tier_blocks_forget(void) {
    if (locked)
        cancel_as_before();
    locked = 0;
    pthread_mutex_init(&lock, NULL);
    memset(arenas, 0, sizeof arenas);
    arena_count = high = 0;
    by_address = NULL;
    atomic_store(&vgpu_tier_pinned, 0);
    vacant = VGPU_TIER_NONE;
    atomic_store(&records, NULL);
    for (unsigned i = 0; i < VGPU_MAX_CARDS; i++)
        atomic_store(&cards[i], NULL);
    for (unsigned i = 0; i < VGPU_TIER_LEAVES; i++)
        atomic_store_explicit(&vgpu_tier_leaves[i], NULL, memory_order_relaxed);
    atomic_store(&vgpu_tier_used, false);
}

void vgpu_tier_lock(void) {
    vgpu_own_tables();
    if (locked++ != 0)
        return;
    cancel_later();
    pthread_mutex_lock(&lock);
}

bool vgpu_tier_try(void) {
    vgpu_own_tables();
    if (!locked) {
        cancel_later();
        if ((pthread_mutex_trylock ? pthread_mutex_trylock(&lock) : pthread_mutex_lock(&lock)) != 0) {
            cancel_as_before();
            return false;
        }
    }
    locked++;
    return true;
}

void vgpu_tier_unlock(void) {
    if (!locked || --locked != 0) /* this is a child, forked in between: it does not hold the lock any more */
        return;
    pthread_mutex_unlock(&lock);
    cancel_as_before();
}

/* Memory of the process that exists only where it is touched; NULL: none. */
static void *sparse_memory(size_t bytes) {
    const int kept = errno;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    errno = kept;
    return memory == MAP_FAILED ? NULL : memory;
}

struct vgpu_tier_record *vgpu_tier_record(uint32_t number) {
    return &atomic_load_explicit(&records, memory_order_acquire)[number];
}

struct vgpu_tier_card *vgpu_tier_card(unsigned card) {
    return card < VGPU_MAX_CARDS ? atomic_load_explicit(&cards[card], memory_order_acquire) : NULL;
}

static struct vgpu_tier_card *card_for(unsigned card) {
    struct vgpu_tier_card *made = vgpu_tier_card(card);
    if (made || card >= VGPU_MAX_CARDS)
        return made;
    struct {
        struct vgpu_tier_card card;
        uint32_t record_of[VGPU_TIER_MOST];
        struct vgpu_tier_block blocks[VGPU_TIER_MOST];
    } *memory = sparse_memory(sizeof *memory);
    if (!memory)
        return NULL;
    made = &memory->card;
    made->record_of = memory->record_of;
    vgpu_tier_begin(&made->policy, memory->blocks, VGPU_TIER_MOST);
    atomic_store_explicit(&cards[card], made, memory_order_release);
    return made;
}

/* Makes leaves for all addresses of a range. */
static bool make_leaves(CUdeviceptr base, uint64_t bytes) {
    if ((base + bytes - 1) >> VGPU_TIER_LEAF_SHIFT >= VGPU_TIER_LEAVES)
        return false;
    for (uint64_t i = base >> VGPU_TIER_LEAF_SHIFT; i <= (base + bytes - 1) >> VGPU_TIER_LEAF_SHIFT; i++) {
        if (atomic_load_explicit(&vgpu_tier_leaves[i], memory_order_relaxed))
            continue;
        void *leaf = sparse_memory(LEAF_ENTRIES * sizeof(uint32_t));
        if (!leaf)
            return false;
        atomic_store_explicit(&vgpu_tier_leaves[i], leaf, memory_order_release);
    }
    return true;
}

/* Adds an arena that has room for `granules`. */
static struct arena *add_arena(uint64_t granules) {
    const uint64_t least = granules << VGPU_TIER_SHIFT;
    uint64_t bytes = (least + ARENA_BYTES - 1) / ARENA_BYTES * ARENA_BYTES;
    CUdeviceptr base = 0;
    if (arena_count == ARENAS || granules > UINT64_MAX >> (VGPU_TIER_SHIFT + 1) || !DRIVER(cuMemAddressReserve) ||
        !DRIVER(cuMemAddressFree))
        return NULL;
    const CUstreamCaptureMode mode = vgpu_relax();
    CUresult result = DRIVER(cuMemAddressReserve)(&base, bytes, VGPU_TIER_GRANULE, 0, 0);
    /* the reservation may fail because of a limit on addresses */
    while (result != CUDA_SUCCESS && bytes / 2 >= least && bytes / 2 >= LEAST_ARENA_BYTES) {
        bytes /= 2;
        result = DRIVER(cuMemAddressReserve)(&base, bytes, VGPU_TIER_GRANULE, 0, 0);
    }
    struct arena arena = {.base = base, .granules = bytes >> VGPU_TIER_SHIFT};
    if (result == CUDA_SUCCESS) {
        const size_t map_bytes = (arena.granules + 63) / 64 * sizeof *arena.taken;
        arena.taken = sparse_memory(map_bytes);
        if (!arena.taken || !make_leaves(base, bytes)) {
            if (arena.taken)
                munmap(arena.taken, map_bytes);
            arena.taken = NULL;
            DRIVER(cuMemAddressFree)(base, bytes);
        }
    }
    vgpu_restore(mode);
    if (!arena.taken)
        return NULL;
    arenas[arena_count] = arena;
    return &arenas[arena_count++];
}

static bool is_taken(const struct arena *arena, uint64_t granule) {
    return arena->taken[granule / 64] >> granule % 64 & 1;
}

static void mark(struct arena *arena, uint64_t first, uint64_t count, bool taken) {
    for (uint64_t granule = first; granule < first + count; granule++) {
        const uint64_t bit = UINT64_C(1) << granule % 64;
        arena->taken[granule / 64] = taken ? arena->taken[granule / 64] | bit : arena->taken[granule / 64] & ~bit;
    }
}

/* The first gap of `count` granules; UINT64_MAX: none. */
static uint64_t gap(struct arena *arena, uint64_t count) {
    uint64_t begin = arena->hint;
    while (begin < arena->granules && is_taken(arena, begin))
        begin++;
    arena->hint = begin;
    for (uint64_t end = begin; end < arena->granules; end++) {
        if (end % 64 == 0 && end == begin && arena->taken[end / 64] == UINT64_MAX) {
            end += 63;
            begin = end + 1;
        } else if (is_taken(arena, end)) {
            begin = end + 1;
        } else if (end + 1 - begin == count) {
            return begin;
        }
    }
    return UINT64_MAX;
}

CUdeviceptr vgpu_tier_reserve(uint64_t bytes) {
    const uint64_t count = bytes >> VGPU_TIER_SHIFT;
    uint64_t found = UINT64_MAX;
    struct arena *arena = arenas;
    for (unsigned i = 0; i < arena_count && found == UINT64_MAX; i++) {
        arena = &arenas[i];
        found = gap(arena, count);
    }
    if (found == UINT64_MAX) {
        arena = add_arena(count);
        if (!arena)
            return 0;
        found = 0;
    }
    mark(arena, found, count, true);
    return arena->base + (found << VGPU_TIER_SHIFT);
}

void vgpu_tier_unreserve(CUdeviceptr base, uint64_t bytes) {
    for (unsigned i = 0; i < arena_count; i++) {
        struct arena *arena = &arenas[i];
        if (base < arena->base || (base - arena->base) >> VGPU_TIER_SHIFT >= arena->granules)
            continue;
        const uint64_t first = (base - arena->base) >> VGPU_TIER_SHIFT;
        mark(arena, first, bytes >> VGPU_TIER_SHIFT, false);
        if (first < arena->hint)
            arena->hint = first;
        return;
    }
}

/* Enters a block (or none) for all its granules. */
static void name(const struct vgpu_tier_record *block, uint32_t number) {
    for (CUdeviceptr at = block->base; at < block->base + block->bytes; at += VGPU_TIER_GRANULE) {
        _Atomic uint32_t *leaf =
            atomic_load_explicit(&vgpu_tier_leaves[at >> VGPU_TIER_LEAF_SHIFT], memory_order_relaxed);
        atomic_store_explicit(&leaf[at >> VGPU_TIER_SHIFT & (LEAF_ENTRIES - 1)], ~number, memory_order_release);
    }
}

static uint32_t vacant_record(void) {
    struct vgpu_tier_record *all = atomic_load_explicit(&records, memory_order_relaxed);
    if (!all) {
        all = sparse_memory(VGPU_TIER_MOST * sizeof *all);
        if (!all)
            return VGPU_TIER_NONE;
        atomic_store_explicit(&records, all, memory_order_release);
    }
    if (vacant == VGPU_TIER_NONE)
        return high < VGPU_TIER_MOST ? high++ : VGPU_TIER_NONE;
    const uint32_t number = vacant;
    vacant = all[number].next;
    return number;
}

/* How many pinned blocks begin at or below an address. */
static uint32_t begun_by(CUdeviceptr address) {
    uint32_t low = 0, end = atomic_load_explicit(&vgpu_tier_pinned, memory_order_relaxed);
    while (low < end) {
        const uint32_t middle = low + (end - low) / 2;
        if (vgpu_tier_record(by_address[middle])->base <= address)
            low = middle + 1;
        else
            end = middle;
    }
    return low;
}

static bool order_pinned(uint32_t number) {
    const uint32_t count = atomic_load_explicit(&vgpu_tier_pinned, memory_order_relaxed);
    if (!by_address && !(by_address = sparse_memory(VGPU_TIER_MOST * sizeof *by_address)))
        return false;
    const uint32_t at = begun_by(vgpu_tier_record(number)->base);
    memmove(&by_address[at + 1], &by_address[at], (count - at) * sizeof *by_address);
    by_address[at] = number;
    atomic_store_explicit(&vgpu_tier_pinned, count + 1, memory_order_release);
    return true;
}

static void forget_pinned(uint32_t number) {
    const uint32_t count = atomic_load_explicit(&vgpu_tier_pinned, memory_order_relaxed),
                   at = begun_by(vgpu_tier_record(number)->base) - 1;
    memmove(&by_address[at], &by_address[at + 1], (count - at - 1) * sizeof *by_address);
    atomic_store_explicit(&vgpu_tier_pinned, count - 1, memory_order_release);
}

/* Under the lock. */
static uint64_t next_buffer(void) {
    const uint64_t number = atomic_load_explicit(&buffers, memory_order_relaxed);
    atomic_store_explicit(&buffers, number + 1, memory_order_release);
    return number;
}

uint32_t vgpu_tier_enter(const struct vgpu_tier_record *block) {
    const uint32_t number = vacant_record();
    if (number == VGPU_TIER_NONE)
        return number;
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    struct vgpu_tier_card *card = block->movable ? card_for(block->card) : NULL;
    *record = *block;
    record->buffer_id = next_buffer();
    record->next = VGPU_TIER_NONE;
    record->entry = VGPU_TIER_NONE;
    if (card) {
        vgpu_spin_lock(&card->lock);
        record->entry = vgpu_tier_add(&card->policy, record->bytes, record->on_device, false);
        if (record->entry != VGPU_TIER_NONE)
            card->record_of[record->entry] = number;
        vgpu_spin_unlock(&card->lock);
    }
    record->movable = record->entry != VGPU_TIER_NONE;
    if (!record->pinned) {
        name(record, number);
    } else if (!order_pinned(number)) {
        record->bytes = 0;
        record->next = vacant;
        vacant = number;
        return VGPU_TIER_NONE;
    }
    atomic_store_explicit(&vgpu_tier_used, true, memory_order_relaxed);
    return number;
}

void vgpu_tier_leave(uint32_t number) {
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    struct vgpu_tier_card *card = vgpu_tier_card(record->card);
    if (record->pinned)
        forget_pinned(number);
    else
        name(record, VGPU_TIER_NONE);
    if (card && record->entry != VGPU_TIER_NONE) {
        vgpu_spin_lock(&card->lock);
        vgpu_tier_remove(&card->policy, record->entry);
        card->record_of[record->entry] = VGPU_TIER_NONE;
        vgpu_spin_unlock(&card->lock);
    }
    record->bytes = 0;
    record->movable = false;
    record->entry = VGPU_TIER_NONE;
    record->next = vacant;
    vacant = number;
}

void vgpu_tier_pin_block(uint32_t number) {
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    record->shared = true;
    record->movable = false;
    vgpu_charge_fixed(&record->where, record->bytes);
    vgpu_tier_disregard(number);
}

static void regard(const struct vgpu_tier_record *record, bool may_move) {
    struct vgpu_tier_card *card = vgpu_tier_card(record->card);
    if (card && record->entry != VGPU_TIER_NONE) {
        vgpu_spin_lock(&card->lock);
        vgpu_tier_pin(&card->policy, record->entry, !may_move);
        vgpu_spin_unlock(&card->lock);
    }
}

void vgpu_tier_disregard(uint32_t number) {
    regard(vgpu_tier_record(number), false);
}

void vgpu_tier_begin_again(uint32_t number) {
    struct vgpu_tier_record *record = vgpu_tier_record(number);
    record->buffer_id = next_buffer();
    regard(record, record->movable);
}

/* False: there is no block there. */
static bool hold(CUdeviceptr address, bool on_host_too, bool *on_device) {
    if (!vgpu_tier_maybe(address))
        return false;
    vgpu_tier_lock();
    const uint32_t number = vgpu_tier_around(address);
    if (number != VGPU_TIER_NONE) {
        *on_device = vgpu_tier_record(number)->on_device;
        if (*on_device || on_host_too)
            vgpu_tier_pin_block(number);
    }
    vgpu_tier_unlock();
    return number != VGPU_TIER_NONE;
}

bool vgpu_tier_show(CUdeviceptr address) {
    bool on_device;
    return !hold(address, false, &on_device) || on_device;
}

void vgpu_tier_hold(CUdeviceptr address) {
    bool on_device;
    hold(address, true, &on_device);
}

uint64_t vgpu_tier_moment(void) {
    return atomic_load(&buffers);
}

uint32_t vgpu_tier_next(uint32_t from) {
    for (; from < high; from++)
        if (vgpu_tier_record(from)->bytes)
            return from;
    return VGPU_TIER_NONE;
}

uint32_t vgpu_tier_around(CUdeviceptr address) {
    const uint32_t number = vgpu_tier_find(address);
    const uint32_t begun = number == VGPU_TIER_NONE ? begun_by(address) : 0;
    if (!begun)
        return number;
    const struct vgpu_tier_record *record = vgpu_tier_record(by_address[begun - 1]);
    return address - record->base < record->bytes ? by_address[begun - 1] : VGPU_TIER_NONE;
}
