/* Virtual memory management: blocks that are made apart from addresses. A block's memory is on the card until its handles are released *and*
 * it is mapped nowhere and bound to no multicast object. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "blocks.h"
#include "charge.h"
#include "fork.h"
#include "imported.h"

#define BUCKETS 1024u
#define GRANULARITY (2u << 20) /* mappings begin at multiples of this on every card */

enum kind {
    OF_KNOWN_SIZE,   /* charged from the beginning */
    OF_UNKNOWN_SIZE, /* imported, from a driver that maps whole blocks alone: charged from its first mapping on, which tells the size */
    MULTICAST,       /* an object without memory of its own */
};

struct bound;
struct block {
    enum kind kind;
    uint64_t charged;    /* bytes */
    struct bound *bound; /* what a multicast object keeps on the cards */
    struct vgpu_ticket ticket; /* where something is charged */
    CUdevice device;
    uint32_t references; /* one per handle held, per mapping, per multicast object that it is bound to, per descriptor that it was exported as */
};

struct bound {
    struct bound *next;
    struct block *block;
    CUdevice device;
    uint64_t offset, size;
};

/* A handle or a mapping of a block: one chain per bucket, handles and addresses in tables of their own. */
struct link {
    struct link *next;
    uint64_t key;    /* handle, or start address */
    uint64_t size;   /* of a mapping */
    uint32_t count;  /* times this handle is held */
    struct block *block;
};

/* A descriptor that a block was exported as: it keeps the memory on the card when every handle is released, and until somebody imports it there is
 * nobody else to pay. */
struct exported {
    struct exported *next;
    struct block *block;
    int descriptor;
    dev_t device; /* of the file behind it: the number may come back for another */
    ino_t file;
};

static struct link *handles[BUCKETS], *mappings[BUCKETS];
static struct exported *exports;
/* Held across the driver calls too, which take the order in which it is taken: else a block could be mapped by one thread, with a handle that
 * another is releasing, and be on the card without a charge. Blocks are made and mapped rarely, and in large pieces. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void vgpu_blocks_forget(void) {
    for (unsigned i = 0; i < BUCKETS; i++)
        handles[i] = mappings[i] = NULL;
    exports = NULL;
    pthread_mutex_init(&lock, NULL);
}

static __thread __attribute__((tls_model("initial-exec"))) bool locked; /* by this thread */

static void lock_tables(void) {
    vgpu_own_tables();
    pthread_mutex_lock(&lock);
    locked = true;
}

static void unlock_tables(void) {
    locked = false;
    pthread_mutex_unlock(&lock);
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

/* Lock held. Ends a block with its last reference. */
static void drop(struct block *block) {
    if (--block->references)
        return;
    while (block->bound) {
        struct bound *bound = block->bound;
        block->bound = bound->next;
        drop(bound->block);
        free(bound);
    }
    if (block->charged)
        vgpu_uncharge(block->ticket, block->charged);
    free(block);
}

/* Lock held. Lets go of blocks whose exported descriptors the program has closed; whether there were any. */
static bool settle_exports(void) {
    bool any = false;
    int kept = errno;
    for (struct exported **at = &exports; *at;) {
        struct exported *exported = *at;
        struct stat now;
        if (fstat(exported->descriptor, &now) == 0 && now.st_dev == exported->device && now.st_ino == exported->file) {
            at = &exported->next;
            continue;
        }
        *at = exported->next;
        drop(exported->block);
        free(exported);
        any = true;
    }
    errno = kept;
    return any;
}

struct payment {
    uint64_t bytes; /* 0: nothing was due */
    struct vgpu_ticket ticket;
};

/* Lock held. Before the driver is asked for a use of a part of a block; false: it is beyond the limit. */
static bool pay(const struct block *block, uint64_t offset, uint64_t size, struct payment *payment) {
    uint64_t end;
    *payment = (struct payment){0};
    if (block->kind != OF_UNKNOWN_SIZE || __builtin_add_overflow(offset, size, &end) || end <= block->charged)
        return true;
    settle_exports(); /* which nobody else can do while the lock is held */
    enum vgpu_verdict verdict = vgpu_reserve(vgpu_card_of_device(block->device), end, &payment->ticket);
    payment->bytes = verdict == VGPU_CHARGED ? end : 0;
    return verdict != VGPU_REFUSED;
}

/* Lock held. After its answer. A use that is granted tells the size: a driver that maps parts would have told it before. */
static void paid(struct block *block, const struct payment *payment, CUresult result) {
    if (!payment->bytes)
        return;
    if (result != CUDA_SUCCESS) {
        vgpu_uncharge(payment->ticket, payment->bytes);
        return;
    }
    if (block->charged)
        vgpu_uncharge(block->ticket, block->charged);
    block->ticket = payment->ticket;
    block->charged = payment->bytes;
}

bool vgpu_blocks_give_back(void) {
    if (locked || !__atomic_load_n(&exports, __ATOMIC_RELAXED))
        return false;
    lock_tables();
    bool any = settle_exports();
    unlock_tables();
    return any;
}

static struct link *mapping_around(uint64_t address) {
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct link *m = mappings[i]; m; m = m->next)
            if (address >= m->key && address - m->key < m->size)
                return m;
    return NULL;
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
        *block = (struct block){.charged = bytes, .ticket = ticket, .device = properties->location.id, .references = 1};
        *link = (struct link){.key = *handle, .count = 1, .block = block};
        add(handles, link);
    }
    unlock_tables();
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
    settle_exports();
    CUresult result = real(handle);
    struct link *link = result == CUDA_SUCCESS ? find(handles, handle) : NULL;
    if (link)
        drop(link->block);
    if (link && --link->count == 0)
        free(take(handles, handle));
    unlock_tables();
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUDA_REAL(cuMemMap);
    struct link *mapping = calloc(1, sizeof *mapping);
    lock_tables();
    struct link *link = find(handles, handle);
    struct payment payment = {0};
    /* without memory for the record it would be on the card uncharged, when its handle is released */
    bool may = !link || (mapping && pay(link->block, offset, size, &payment));
    CUresult result = may ? real(address, size, offset, handle, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (link && may)
        paid(link->block, &payment, result);
    if (result == CUDA_SUCCESS && link) {
        *mapping = (struct link){.key = address, .size = size, .block = link->block};
        link->block->references++;
        add(mappings, mapping);
        mapping = NULL;
    }
    unlock_tables();
    free(mapping);
    return result;
}

/* One call may unmap several neighbouring mappings, whole ones only. */
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUDA_REAL(cuMemUnmap);
    lock_tables();
    CUresult result = real(address, size);
    for (uint64_t at = address, end = address + size; result == CUDA_SUCCESS && at < end;) {
        struct link *mapping = take(mappings, at);
        at += mapping ? mapping->size : GRANULARITY; /* what is not ours, or a gap that the driver allows */
        if (mapping)
            drop(mapping->block);
        free(mapping);
    }
    unlock_tables();
    return result;
}

/* A new handle, or one more hold of an old one, for the block that is mapped around an address. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUDA_REAL(cuMemRetainAllocationHandle);
    struct link *fresh = calloc(1, sizeof *fresh);
    lock_tables();
    CUresult result = real(handle, address);
    struct link *mapping = result == CUDA_SUCCESS ? mapping_around((uint64_t)(uintptr_t)address) : NULL;
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
    unlock_tables();
    free(fresh);
    return result;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    CUDA_REAL(cuMemExportToShareableHandle);
    struct exported *exported = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? malloc(sizeof *exported) : NULL;
    lock_tables();
    settle_exports();
    CUresult result = real(shareable, handle, type, flags);
    struct link *link = result == CUDA_SUCCESS && exported ? find(handles, handle) : NULL;
    struct stat file;
    int kept = errno;
    if (link && fstat(*(int *)shareable, &file) == 0) {
        *exported = (struct exported){exports, link->block, *(int *)shareable, file.st_dev, file.st_ino};
        exports = exported;
        link->block->references++;
        exported = NULL;
    }
    errno = kept;
    unlock_tables();
    free(exported);
    return result;
}

/* Lock held. Memory that this process did not hold: it is charged here, too. Whoever made it may let go of it at any time, and then it stays on the
 * card for this process; no call of the driver tells who else holds it. */
static CUresult charge_imported(CUmemGenericAllocationHandle handle, struct block *block, struct link *link) {
    struct vgpu_imported memory;
    enum vgpu_import kind = block && link ? vgpu_imported(handle, &memory) : VGPU_IMPORT_UNREADABLE;
    if (kind == VGPU_IMPORT_HOST)
        return CUDA_SUCCESS;
    struct vgpu_ticket ticket = {0};
    if (kind == VGPU_IMPORT_UNREADABLE ||
        (kind == VGPU_IMPORT_SIZED && vgpu_reserve(vgpu_card_of_device(memory.device), memory.bytes, &ticket) != VGPU_CHARGED))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *block = (struct block){.kind = kind == VGPU_IMPORT_SIZED ? OF_KNOWN_SIZE : OF_UNKNOWN_SIZE,
                            .charged = memory.bytes,
                            .ticket = ticket,
                            .device = memory.device,
                            .references = 1};
    *link = (struct link){.key = handle, .count = 1, .block = block};
    add(handles, link);
    return CUDA_SUCCESS;
}

/* Memory of this process comes back under its own handle. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
    CUDA_REAL(cuMemImportFromShareableHandle);
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return real(handle, shareable, type);
    struct block *block = calloc(1, sizeof *block);
    struct link *fresh = calloc(1, sizeof *fresh);
    lock_tables();
    settle_exports();
    CUresult result = real(handle, shareable, type);
    struct link *link = result == CUDA_SUCCESS ? find(handles, *handle) : NULL;
    if (link) {
        link->count++;
        link->block->references++;
    } else if (result == CUDA_SUCCESS) {
        result = charge_imported(*handle, block, fresh);
        if (result != CUDA_SUCCESS && DRIVER(cuMemRelease))
            DRIVER(cuMemRelease)(*handle);
    }
    bool kept = fresh && fresh->block;
    unlock_tables();
    if (!kept) {
        free(block);
        free(fresh);
    }
    return result;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
    CUDA_REAL(cuMulticastCreate);
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return real(handle, properties);
    struct block *block = calloc(1, sizeof *block);
    struct link *link = calloc(1, sizeof *link);
    lock_tables();
    CUresult result = block && link ? real(handle, properties) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        *block = (struct block){.kind = MULTICAST, .references = 1};
        *link = (struct link){.key = *handle, .count = 1, .block = block};
        add(handles, link);
    }
    unlock_tables();
    if (result != CUDA_SUCCESS) {
        free(block);
        free(link);
    }
    return result;
}

/* Lock held. */
static void bind(struct link *object, struct link *memory, CUdevice device, uint64_t offset, uint64_t size, struct bound *bound) {
    *bound = (struct bound){.next = object->block->bound, .block = memory->block, .device = device, .offset = offset, .size = size};
    object->block->bound = bound;
    memory->block->references++;
}

/* The two forms of each call: with its device (CUDA 13.1), which can only be that of the memory, and without. */
typedef CUresult (*bind_handle)(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long);
typedef CUresult (*bind_handle_of)(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                                   unsigned long long);
typedef CUresult (*bind_address)(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
typedef CUresult (*bind_address_of)(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);

static CUresult bind_memory(bind_handle plain, bind_handle_of with_device, CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t start, size_t size, unsigned long long flags) {
    struct bound *bound = calloc(1, sizeof *bound);
    lock_tables();
    struct link *to = find(handles, object), *what = find(handles, memory);
    bool counted = to && what;
    struct payment payment = {0};
    bool may = !counted || (bound && pay(what->block, start, size, &payment));
    CUresult result = !may    ? CUDA_ERROR_OUT_OF_MEMORY
                      : plain ? plain(object, offset, memory, start, size, flags)
                              : with_device(object, device, offset, memory, start, size, flags);
    if (counted && may)
        paid(what->block, &payment, result);
    if (result == CUDA_SUCCESS && counted) {
        bind(to, what, what->block->device, offset, size, bound);
        bound = NULL;
    }
    unlock_tables();
    free(bound);
    return result;
}

static CUresult bind_mapped(bind_address plain, bind_address_of with_device, CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
                            CUdeviceptr address, size_t size, unsigned long long flags) {
    struct bound *bound = calloc(1, sizeof *bound);
    lock_tables();
    struct link *to = find(handles, object), *what = mapping_around(address);
    bool counted = to && what;
    CUresult result = counted && !bound ? CUDA_ERROR_OUT_OF_MEMORY
                      : plain           ? plain(object, offset, address, size, flags)
                                        : with_device(object, device, offset, address, size, flags);
    if (result == CUDA_SUCCESS && counted) {
        bind(to, what, what->block->device, offset, size, bound);
        bound = NULL;
    }
    unlock_tables();
    free(bound);
    return result;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t start, size_t size,
                            unsigned long long flags) {
    CUDA_REAL(cuMulticastBindMem);
    return bind_memory(real, NULL, object, 0, offset, memory, start, size, flags);
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory, size_t start,
                               size_t size, unsigned long long flags) {
    CUDA_REAL(cuMulticastBindMem_v2);
    return bind_memory(NULL, real, object, device, offset, memory, start, size, flags);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size, unsigned long long flags) {
    CUDA_REAL(cuMulticastBindAddr);
    return bind_mapped(real, NULL, object, 0, offset, address, size, flags);
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr address, size_t size,
                                unsigned long long flags) {
    CUDA_REAL(cuMulticastBindAddr_v2);
    return bind_mapped(NULL, real, object, device, offset, address, size, flags);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t size) {
    CUDA_REAL(cuMulticastUnbind);
    lock_tables();
    CUresult result = real(object, device, offset, size);
    struct link *link = result == CUDA_SUCCESS ? find(handles, object) : NULL;
    for (struct bound **at = link ? &link->block->bound : NULL; at && *at;) {
        struct bound *bound = *at;
        if (bound->device == device && bound->offset >= offset && bound->offset + bound->size <= offset + size) {
            *at = bound->next;
            drop(bound->block);
            free(bound);
        } else {
            at = &bound->next;
        }
    }
    unlock_tables();
    return result;
}
