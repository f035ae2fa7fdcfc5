/* Device memory by address. The address contains the size class and the slot, so a lookup costs the same for any number
 * of blocks. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/driver.h"

#define SMALLEST 9u /* blocks start at multiples of 512 bytes, like the driver's */
#define CLASSES 32u
#define CLASS_BITS 42u
#define CHUNK 1024u
#define CHUNKS 16384u

static struct class {
    struct block *chunks[CHUNKS];
    uint32_t used, free_list; /* used: slots ever used; free_list: slot + 1, 0: none */
} classes[CLASSES];
static _Atomic int locked;
static uint64_t last_id; /* even; other memory has odd ids */

static void lock_blocks(void) {
    while (atomic_exchange_explicit(&locked, 1, memory_order_acquire))
        for (int spins = 0; atomic_load_explicit(&locked, memory_order_relaxed); spins++)
            if (spins > 100)
                sched_yield();
}

static void unlock_blocks(void) {
    atomic_store_explicit(&locked, 0, memory_order_release);
}

static uint32_t class_of(uint64_t size) {
    uint32_t bits = size <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(size - 1);
    return bits <= SMALLEST ? 0 : bits - SMALLEST;
}

static struct block *slot_of(struct class *class, uint32_t slot) {
    struct block *chunk =
        slot / CHUNK < CHUNKS ? __atomic_load_n(&class->chunks[slot / CHUNK], __ATOMIC_ACQUIRE) : NULL;
    return chunk ? &chunk[slot % CHUNK] : NULL;
}

static struct block *decode(CUdeviceptr address, CUdeviceptr *base) {
    if (address < DEVICE_WINDOW || address >= RESERVATION_WINDOW)
        return NULL;
    uint64_t offset = address - DEVICE_WINDOW;
    uint32_t index = (uint32_t)(offset >> CLASS_BITS), bits = index + SMALLEST;
    uint64_t slot = (offset & ((1ull << CLASS_BITS) - 1)) >> bits;
    *base = address & ~((1ull << bits) - 1);
    return slot < (uint64_t)CHUNK * CHUNKS ? slot_of(&classes[index], (uint32_t)slot) : NULL;
}

CUdeviceptr block_new(uint64_t size, CUcontext context, enum block_kind kind, void *owner) {
    uint32_t index = class_of(size);
    if (index >= CLASSES)
        return 0;
    struct class *class = &classes[index];
    uint64_t slots = 1ull << (CLASS_BITS - SMALLEST - index);
    lock_blocks();
    uint32_t slot = class->free_list - 1;
    if (class->free_list) {
        class->free_list = slot_of(class, slot)->next_free;
    } else {
        slot = class->used;
        bool room = slot < slots && slot < CHUNK * CHUNKS;
        if (room && !class->chunks[slot / CHUNK]) {
            struct block *chunk = calloc(CHUNK, sizeof *chunk);
            __atomic_store_n(&class->chunks[slot / CHUNK], chunk, __ATOMIC_RELEASE);
            room = chunk != NULL;
        }
        if (!room) {
            unlock_blocks();
            return 0;
        }
        class->used++;
    }
    struct block *block = slot_of(class, slot);
    *block = (struct block){.size = size,
                            .context = context,
                            .kind = (uint8_t)kind,
                            .owner = owner,
                            .live = 1,
                            .absent = kind == BLOCK_GRAPH};
    block->id = last_id += 2;
    unlock_blocks();
    return DEVICE_WINDOW + ((uint64_t)index << CLASS_BITS) + ((uint64_t)slot << (index + SMALLEST));
}

struct block *block_find(CUdeviceptr address, CUdeviceptr *base) {
    struct block *block = decode(address, base);
    return block && block->live && !block->absent && address - *base < block->size ? block : NULL;
}

/* With the lock held. */
static void drop(struct class *class, uint32_t slot, struct block *block) {
    block->live = 0;
    block->contents = NULL;
    block->next_free = class->free_list;
    class->free_list = slot + 1;
}

void block_contents(CUdeviceptr base, char *contents) {
    struct block *block = decode(base, &base);
    __atomic_store_n(&block->contents, contents, __ATOMIC_RELEASE);
}

static void unmap(const struct block *block) {
    if (block->contents && block->kind != BLOCK_EXTERNAL)
        munmap(block->contents, block->size);
}

bool block_take(CUdeviceptr address, enum block_kind last, struct block *out) {
    CUdeviceptr base;
    lock_blocks();
    struct block *block = decode(address, &base);
    bool found = block && block->live && !block->absent && base == address && block->kind <= last;
    if (found && block->kind == BLOCK_GRAPH) { /* the graph keeps the address */
        *out = *block;
        block->absent = true;
        block->contents = NULL;
    } else if (found) {
        uint64_t offset = address - DEVICE_WINDOW;
        uint32_t index = (uint32_t)(offset >> CLASS_BITS);
        *out = *block;
        drop(&classes[index], (uint32_t)((offset & ((1ull << CLASS_BITS) - 1)) >> (index + SMALLEST)), block);
    }
    unlock_blocks();
    if (found)
        unmap(out);
    return found;
}

struct block *block_of_graph(CUdeviceptr address) {
    CUdeviceptr base;
    struct block *block = decode(address, &base);
    return block && block->live && block->kind == BLOCK_GRAPH && base == address ? block : NULL;
}

void block_each(bool (*match)(const struct block *, void *), void (*visit)(const struct block *, void *),
                void *argument) {
    for (uint32_t index = 0; index < CLASSES; index++)
        for (uint32_t slot = 0; slot < classes[index].used; slot++) {
            struct block *block = slot_of(&classes[index], slot), copy;
            lock_blocks();
            bool taken = block->live && match(block, argument);
            if (taken) {
                copy = *block;
                drop(&classes[index], slot, block);
            }
            unlock_blocks();
            if (!taken)
                continue;
            unmap(&copy);
            visit(&copy, argument);
        }
}

char *zero_pages(uint64_t size) {
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return map == MAP_FAILED ? NULL : map;
}

/* Makes a block's contents at the first touch, by any thread. If the program frees the block meanwhile, the caller gets
 * an error: pages of the old size must not become pages of the next block. */
static CUresult touch(struct block *block, char **contents) {
    const uint64_t id = block->id, size = block->size;
    char *fresh = zero_pages(size);
    if (!fresh)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock_blocks();
    bool same = block->live && !block->absent && block->id == id && block->size == size;
    if (same && !block->contents) {
        __atomic_store_n(&block->contents, fresh, __ATOMIC_RELEASE);
        fresh = NULL;
    }
    *contents = same ? block->contents : NULL;
    unlock_blocks();
    if (fresh)
        munmap(fresh, size);
    return same ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult view(int device, CUdeviceptr address, size_t size, bool writes, char **host, size_t *length) {
    CUdeviceptr base;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (address < DEVICE_WINDOW) {
        *host = (char *)address;
        *length = size;
        return CUDA_SUCCESS;
    }
    if (address < RESERVATION_WINDOW) {
        struct block *block = block_find(address, &base);
        if (!block)
            return CUDA_ERROR_INVALID_VALUE;
        char *contents = __atomic_load_n(&block->contents, __ATOMIC_ACQUIRE);
        if (!contents && (result = touch(block, &contents)))
            return result;
        *host = contents + (address - base);
        *length = block->size - (address - base) < size ? block->size - (address - base) : size;
        return *length < size ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    }
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    if (range) {
        struct physical *physical = range->physical;
        uint64_t offset = address - range->base;
        if (!physical->contents && !physical->multicast)
            physical->contents = zero_pages(physical->size);
        *host = physical->contents + range->offset + offset;
        *length = range->size - offset < size ? range->size - offset : size;
        CUmemAccess_flags needed = writes ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
        result = access_of(range, device) < needed || physical->multicast ? CUDA_ERROR_INVALID_VALUE
                 : physical->contents                                     ? CUDA_SUCCESS
                                                                          : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}
