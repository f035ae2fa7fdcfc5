/* A sharded table from a handle to its size and charge. */
#define _GNU_SOURCE
#include "ledger/sizes.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/spin.h"

#define FIRST_CAPACITY 128u /* entries; always a power of two */

struct entry {
    uint64_t key; /* 0: free */
    struct vgpu_holding holding;
    uint64_t number; /* larger than the number of every earlier entry of the shard */
};

static struct shard {
    vgpu_spin lock;
    uint32_t count;
    uint32_t capacity;
    struct entry *entries;
    _Atomic uint64_t numbers; /* numbers given so far; changed under the lock */
} __attribute__((aligned(VGPU_CACHE_LINE))) shards[VGPU_SHARDS];

atomic_bool vgpu_sizes_used;

/* Addresses and handles fit into 60 bits on both architectures; the space uses the upper bits. */
static uint64_t key_of(enum vgpu_space space, uint64_t handle) {
    return (handle & 0x0fffffffffffffffull) | ((uint64_t)space + 1) << 60;
}

static uint64_t mixed(uint64_t key) {
    key ^= key >> 32;
    key *= 0x9e3779b97f4a7c15ull;
    return key ^ key >> 29;
}

static struct shard *shard_of(uint64_t hash) {
    return &shards[hash >> 60];
}

static uint32_t home_of(const struct shard *shard, uint64_t key) {
    return (uint32_t)mixed(key) & (shard->capacity - 1);
}

void vgpu_sizes_forget(void) {
    for (unsigned i = 0; i < VGPU_SHARDS; i++)
        memset(&shards[i], 0, sizeof shards[i]);
}

static struct entry *vacant(struct shard *shard, uint64_t hash) {
    uint32_t i = (uint32_t)hash & (shard->capacity - 1);
    while (shard->entries[i].key != 0)
        i = (i + 1) & (shard->capacity - 1);
    return &shard->entries[i];
}

/* The newest entry of a key with at most that number; NULL: none. */
static struct entry *find(const struct shard *shard, uint64_t key, uint64_t hash, uint64_t newest) {
    struct entry *found = NULL, *entry;
    if (!shard->capacity)
        return NULL;
    for (uint32_t i = (uint32_t)hash & (shard->capacity - 1); (entry = &shard->entries[i])->key != 0;
         i = (i + 1) & (shard->capacity - 1))
        if (entry->key == key && entry->number <= newest && (!found || entry->number > found->number))
            found = entry;
    return found;
}

__attribute__((noinline)) static bool grow(struct shard *shard) {
    struct shard larger = {.capacity = shard->capacity ? shard->capacity * 2 : FIRST_CAPACITY};
    int kept = errno;
    void *memory =
        mmap(NULL, larger.capacity * sizeof(struct entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    errno = kept;
    if (memory == MAP_FAILED)
        return false;
    larger.entries = memory;
    for (uint32_t i = 0; i < shard->capacity; i++)
        if (shard->entries[i].key)
            *vacant(&larger, mixed(shard->entries[i].key)) = shard->entries[i];
    if (shard->entries)
        munmap(shard->entries, shard->capacity * sizeof(struct entry));
    shard->entries = larger.entries;
    shard->capacity = larger.capacity;
    atomic_store_explicit(&vgpu_sizes_used, true, memory_order_relaxed);
    return true;
}

bool vgpu_sizes_put(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding) {
    uint64_t key = key_of(space, handle), hash = mixed(key);
    struct shard *shard = shard_of(hash);
    vgpu_spin_lock(&shard->lock);
    bool room = shard->count * 2 < shard->capacity || grow(shard);
    if (room) {
        const uint64_t number = atomic_load_explicit(&shard->numbers, memory_order_relaxed) + 1;
        *vacant(shard, hash) = (struct entry){.key = key, .holding = *holding, .number = number};
        shard->count++;
        atomic_store_explicit(&shard->numbers, number, memory_order_relaxed);
    }
    vgpu_spin_unlock(&shard->lock);
    return room;
}

/* Closes the gap at `i`, so that a search never steps over removed entries. */
static void remove_at(struct shard *shard, uint32_t i) {
    uint32_t mask = shard->capacity - 1;
    for (uint32_t j = (i + 1) & mask; shard->entries[j].key; j = (j + 1) & mask) {
        uint32_t home = home_of(shard, shard->entries[j].key);
        if (((j - home) & mask) >= ((j - i) & mask)) {
            shard->entries[i] = shard->entries[j];
            i = j;
        }
    }
    shard->entries[i].key = 0;
    shard->count--;
}

bool vgpu_sizes_take(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding) {
    return vgpu_sizes_free_end(
        space, handle, &(struct vgpu_freeing){.hash = mixed(key_of(space, handle)), .newest = UINT64_MAX}, holding);
}

bool vgpu_sizes_has(enum vgpu_space space, uint64_t handle) {
    const uint64_t hash = mixed(key_of(space, handle));
    struct shard *shard = shard_of(hash);
    vgpu_spin_lock(&shard->lock);
    const bool found = find(shard, key_of(space, handle), hash, UINT64_MAX) != NULL;
    vgpu_spin_unlock(&shard->lock);
    return found;
}

/* A thread that knows the handle has seen the number of its entry, or a later one. A new entry of the same handle can
 * only come after the driver's answer, and this load must not be delayed past that answer. */
bool vgpu_sizes_free_begin(enum vgpu_space space, uint64_t handle, struct vgpu_freeing *freeing) {
    freeing->hash = mixed(key_of(space, handle));
    freeing->newest = atomic_load_explicit(&shard_of(freeing->hash)->numbers, memory_order_acquire);
    return freeing->newest != 0;
}

bool vgpu_sizes_free_end(enum vgpu_space space, uint64_t handle, const struct vgpu_freeing *freeing,
                         struct vgpu_holding *holding) {
    struct shard *shard = shard_of(freeing->hash);
    vgpu_spin_lock(&shard->lock);
    struct entry *entry = find(shard, key_of(space, handle), freeing->hash, freeing->newest);
    bool found = entry != NULL;
    if (found) {
        *holding = entry->holding;
        remove_at(shard, (uint32_t)(entry - shard->entries));
    }
    vgpu_spin_unlock(&shard->lock);
    return found;
}

bool vgpu_sizes_join(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding) {
    uint64_t key = key_of(space, handle), hash = mixed(key);
    struct shard *shard = shard_of(hash);
    vgpu_spin_lock(&shard->lock); /* until then no thread can take the handle out, so the share lives */
    struct entry *entry = find(shard, key, hash, UINT64_MAX);
    bool found = entry && entry->holding.payer == VGPU_PAID_BY_SHARE;
    if (found) {
        *holding = entry->holding;
        atomic_fetch_add(&holding->share->handles, 1);
    }
    vgpu_spin_unlock(&shard->lock);
    return found;
}

void vgpu_sizes_moment(struct vgpu_moment *moment) {
    for (unsigned s = 0; s < VGPU_SHARDS; s++)
        moment->newest[s] = atomic_load_explicit(&shards[s].numbers, memory_order_acquire);
}

void vgpu_sizes_take_owned(const void *owner, const struct vgpu_moment *until,
                           void (*each)(const struct vgpu_holding *, void *), void *argument) {
    for (unsigned s = 0; s < VGPU_SHARDS; s++) {
        struct shard *shard = &shards[s];
        vgpu_spin_lock(&shard->lock);
        for (uint32_t i = 0; i < shard->capacity;) {
            struct entry entry = shard->entries[i];
            if (entry.key && entry.holding.owner == owner && entry.number <= until->newest[s]) {
                remove_at(shard, i); /* another entry may have moved here: look again */
                each(&entry.holding, argument);
            } else {
                i++;
            }
        }
        vgpu_spin_unlock(&shard->lock);
    }
}
