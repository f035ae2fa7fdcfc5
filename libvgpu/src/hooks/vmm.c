/* Virtual memory management: blocks that are made apart from addresses. A block's memory is on the card until its handles are released *and*
 * it is mapped nowhere. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "charge.h"
#include "fork.h"
#include "spin.h"

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
static vgpu_spin lock; /* of all of the above; never held across a driver call */

void vgpu_blocks_forget(void) {
    for (unsigned i = 0; i < BUCKETS; i++)
        handles[i] = mappings[i] = NULL;
    atomic_store(&lock, 0);
}

static void lock_tables(void) {
    vgpu_own_tables();
    vgpu_spin_lock(&lock);
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
    CUresult result = real(handle, bytes, properties, flags);
    if (verdict == VGPU_UNCHARGED)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_uncharge(ticket, bytes);
        return result;
    }
    struct block *block = calloc(1, sizeof *block);
    struct link *link = calloc(1, sizeof *link);
    if (!block || !link) {
        free(block);
        free(link);
        if (DRIVER(cuMemRelease))
            DRIVER(cuMemRelease)(*handle);
        vgpu_uncharge(ticket, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *block = (struct block){.bytes = bytes, .ticket = ticket, .references = 1};
    *link = (struct link){.key = *handle, .count = 1, .block = block};
    lock_tables();
    add(handles, link);
    vgpu_spin_unlock(&lock);
    return result;
}

/* The hold is taken off before the driver may give the same handle to another thread, and put back if the driver refuses. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUDA_REAL(cuMemRelease);
    lock_tables();
    struct link *link = find(handles, handle);
    struct block *block = link ? link->block : NULL;
    struct link *gone = link && --link->count == 0 ? take(handles, handle) : NULL;
    vgpu_spin_unlock(&lock);
    CUresult result = real(handle);
    if (!block)
        return result;
    struct block *last = NULL;
    lock_tables();
    if (result == CUDA_SUCCESS) {
        last = drop(block);
    } else {
        link->count++;
        if (gone)
            add(handles, gone);
        gone = NULL;
    }
    vgpu_spin_unlock(&lock);
    free(gone);
    give_back(last);
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUDA_REAL(cuMemMap);
    CUresult result = real(address, size, offset, handle, flags);
    if (result != CUDA_SUCCESS)
        return result;
    lock_tables();
    bool known = find(handles, handle) != NULL;
    vgpu_spin_unlock(&lock);
    struct link *mapping = known ? calloc(1, sizeof *mapping) : NULL;
    if (!mapping)
        return result; /* not ours to count; or no memory: then the block is given back when its handle is released */
    lock_tables();
    struct link *link = find(handles, handle);
    if (link) {
        *mapping = (struct link){.key = address, .size = size, .block = link->block};
        link->block->references++;
        add(mappings, mapping);
        mapping = NULL;
    }
    vgpu_spin_unlock(&lock);
    free(mapping);
    return result;
}

/* One call may unmap several neighbouring mappings, whole ones only. */
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUDA_REAL(cuMemUnmap);
    CUresult result = real(address, size);
    for (uint64_t at = address, end = address + size; result == CUDA_SUCCESS && at < end;) {
        lock_tables();
        struct link *mapping = take(mappings, at);
        struct block *last = mapping ? drop(mapping->block) : NULL;
        vgpu_spin_unlock(&lock);
        at += mapping ? mapping->size : GRANULARITY; /* what is not ours, or a gap that the driver allows */
        if (!mapping)
            continue;
        free(mapping);
        give_back(last);
    }
    return result;
}

/* A new handle, or one more hold of an old one, for the block that is mapped around an address. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUDA_REAL(cuMemRetainAllocationHandle);
    CUresult result = real(handle, address);
    struct link *fresh = result == CUDA_SUCCESS ? calloc(1, sizeof *fresh) : NULL;
    if (!fresh)
        return result;
    uint64_t target = (uint64_t)(uintptr_t)address;
    lock_tables();
    struct link *mapping = NULL;
    for (unsigned i = 0; i < BUCKETS && !mapping; i++)
        for (struct link *m = mappings[i]; m && !mapping; m = m->next)
            if (target >= m->key && target - m->key < m->size)
                mapping = m;
    if (mapping) {
        struct link *link = find(handles, *handle);
        if (!link) {
            *fresh = (struct link){.key = *handle, .block = mapping->block};
            add(handles, fresh);
            link = fresh;
            fresh = NULL;
        }
        link->count++;
        link->block->references++;
    }
    vgpu_spin_unlock(&lock);
    free(fresh);
    return result;
}
