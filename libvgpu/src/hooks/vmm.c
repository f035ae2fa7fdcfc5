/* Virtual memory management: blocks that are made apart from addresses. A block's memory is on the card until its handles are released *and*
 * it is mapped nowhere. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "charge.h"
#include "fork.h"

#define BUCKETS 1024u
#define GRANULARITY (2u << 20) /* mappings begin at multiples of this on every card */

struct block {
    uint64_t bytes;
    struct vgpu_ticket ticket;
    uint32_t references; /* one per handle held, one per mapping */
};

/* A handle or a mapping of a block: one chain per bucket, handles and addresses in tables of their own. */
struct link {
    struct link *next;
    uint64_t key;    /* handle, or start address */
    uint64_t size;   /* of a mapping */
    uint32_t count;  /* times this handle is held */
    struct block *block;
};

static struct link *handles[BUCKETS], *mappings[BUCKETS];
/* Held across the driver calls too, which take the order in which it is taken: else a block could be mapped by one thread, with a handle that
 * another is releasing, and be on the card without a charge. Blocks are made and mapped rarely, and in large pieces. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void vgpu_blocks_forget(void) {
    for (unsigned i = 0; i < BUCKETS; i++)
        handles[i] = mappings[i] = NULL;
    pthread_mutex_init(&lock, NULL);
}

static void lock_tables(void) {
    vgpu_own_tables();
    pthread_mutex_lock(&lock);
}

static struct link **slot_of(struct link **table, uint64_t key) {
    return &table[(key * 0x9e3779b97f4a7c15ull) >> 54];
}

static struct link *find(struct link **table, uint64_t key) {
    struct link *link = *slot_of(table, key);
    while (link && link->key != key)
        link = link->next;
    return link;
}

static void add(struct link **table, struct link *link) {
    struct link **slot = slot_of(table, link->key);
    link->next = *slot;
    *slot = link;
}

static struct link *take(struct link **table, uint64_t key) {
    struct link **at = slot_of(table, key);
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    struct link *link = *at;
    if (link)
        *at = link->next;
    return link;
}

/* Lock held. The block to give back when that was the last reference, else NULL. */
static struct block *drop(struct block *block) {
    return --block->references == 0 ? block : NULL;
}

static void give_back(struct block *block) {
    if (!block)
        return;
    vgpu_uncharge(block->ticket, block->bytes);
    free(block);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
    CUDA_REAL(cuMemCreate);
    struct vgpu_ticket ticket;
    enum vgpu_verdict verdict = VGPU_UNCHARGED;
    /* Memory of the host (HOST, HOST_NUMA …) is not the card's; the location says which card it is, not the current context. */
    if (handle && bytes && properties && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && vgpu_enforcement() != VGPU_UNLIMITED &&
        (vgpu_enforcement() == VGPU_BROKEN || vgpu_device_exists(properties->location.id)))
        verdict = vgpu_reserve(vgpu_card_of_device(properties->location.id), bytes, &ticket);
    if (verdict == VGPU_REFUSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (verdict == VGPU_UNCHARGED)
        return real(handle, bytes, properties, flags);
    struct block *block = calloc(1, sizeof *block);
    struct link *link = calloc(1, sizeof *link);
    lock_tables();
    CUresult result = block && link ? real(handle, bytes, properties, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        *block = (struct block){.bytes = bytes, .ticket = ticket, .references = 1};
        *link = (struct link){.key = *handle, .count = 1, .block = block};
        add(handles, link);
    }
    pthread_mutex_unlock(&lock);
    if (result == CUDA_SUCCESS)
        return result;
    free(block);
    free(link);
    vgpu_uncharge(ticket, bytes);
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUDA_REAL(cuMemRelease);
    lock_tables();
    CUresult result = real(handle);
    struct link *link = result == CUDA_SUCCESS ? find(handles, handle) : NULL;
    struct block *last = link ? drop(link->block) : NULL;
    struct link *gone = link && --link->count == 0 ? take(handles, handle) : NULL;
    pthread_mutex_unlock(&lock);
    free(gone);
    give_back(last);
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUDA_REAL(cuMemMap);
    struct link *mapping = calloc(1, sizeof *mapping);
    lock_tables();
    struct link *link = find(handles, handle);
    /* without memory for the record it would be on the card uncharged, when its handle is released */
    CUresult result = link && !mapping ? CUDA_ERROR_OUT_OF_MEMORY : real(address, size, offset, handle, flags);
    if (result == CUDA_SUCCESS && link) {
        *mapping = (struct link){.key = address, .size = size, .block = link->block};
        link->block->references++;
        add(mappings, mapping);
        mapping = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(mapping);
    return result;
}

/* One call may unmap several neighbouring mappings, whole ones only. */
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUDA_REAL(cuMemUnmap);
    struct link *gone = NULL;
    lock_tables();
    CUresult result = real(address, size);
    for (uint64_t at = address, end = address + size; result == CUDA_SUCCESS && at < end;) {
        struct link *mapping = take(mappings, at);
        at += mapping ? mapping->size : GRANULARITY; /* what is not ours, or a gap that the driver allows */
        if (!mapping)
            continue;
        mapping->block = drop(mapping->block);
        mapping->next = gone;
        gone = mapping;
    }
    pthread_mutex_unlock(&lock);
    while (gone) {
        struct link *next = gone->next;
        give_back(gone->block);
        free(gone);
        gone = next;
    }
    return result;
}

/* A new handle, or one more hold of an old one, for the block that is mapped around an address. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUDA_REAL(cuMemRetainAllocationHandle);
    struct link *fresh = calloc(1, sizeof *fresh);
    uint64_t target = (uint64_t)(uintptr_t)address;
    lock_tables();
    CUresult result = real(handle, address);
    struct link *mapping = NULL;
    for (unsigned i = 0; result == CUDA_SUCCESS && i < BUCKETS && !mapping; i++)
        for (struct link *m = mappings[i]; m && !mapping; m = m->next)
            if (target >= m->key && target - m->key < m->size)
                mapping = m;
    struct link *link = mapping ? find(handles, *handle) : NULL;
    if (mapping && !link && fresh) {
        *fresh = (struct link){.key = *handle, .block = mapping->block};
        add(handles, fresh);
        link = fresh;
        fresh = NULL;
    }
    if (link) {
        link->count++;
        link->block->references++;
    }
    pthread_mutex_unlock(&lock);
    free(fresh);
    return result;
}
