/* Virtual memory management: blocks that are made without addresses. A block's memory stays on the card until three
 * conditions hold: its handles are released, it is mapped nowhere (at no address, into no array), and no multicast
 * object has it bound. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "hooks/imported.h"
#include "hooks/vmm.h"
#include "tier/tier.h"

#define BUCKETS 1024u
/* bytes; on every card, each mapping begins at a multiple of GRANULARITY */
#define GRANULARITY (2u << 20)

/* An exported descriptor of a block. The descriptor keeps the memory on the card after every handle is released. Until
 * another process imports the block, only this process can pay. */
struct exported {
    struct exported *next;
    struct vgpu_block *block;
    int descriptor;
    dev_t device; /* of the file behind the descriptor: the descriptor's number may come back for another file */
    ino_t file;
};

static struct vgpu_link *handles[BUCKETS], *mappings[BUCKETS];
static struct exported *exports;
atomic_uint vgpu_blocks_spilled;
/* Held during driver calls too, so that the records change in the order of the calls. Otherwise one thread could map a
 * block by a handle that another thread is releasing. Then the block would be on the card without a charge. Blocks are
 * made and mapped rarely, and in large pieces. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* How often this thread holds `lock`: a driver may call the program back in the middle of a call. */
static __thread __attribute__((tls_model("initial-exec"))) unsigned locked;

void vgpu_blocks_forget(void) {
    locked = 0;
    for (unsigned i = 0; i < BUCKETS; i++)
        handles[i] = mappings[i] = NULL;
    exports = NULL;
    atomic_store(&vgpu_blocks_spilled, 0);
    pthread_mutex_init(&lock, NULL);
}

void vgpu_blocks_lock(void) {
    vgpu_own_tables();
    if (locked++ == 0)
        pthread_mutex_lock(&lock);
}

void vgpu_blocks_unlock(void) {
    if (locked && --locked == 0) /* a child that was forked in between has released the lock */
        pthread_mutex_unlock(&lock);
}

static struct vgpu_link **slot_of(struct vgpu_link **table, uint64_t key) {
    return &table[(key * 0x9e3779b97f4a7c15ull) >> 54];
}

static struct vgpu_link *find(struct vgpu_link **table, uint64_t key) {
    struct vgpu_link *link = *slot_of(table, key);
    while (link && link->key != key)
        link = link->next;
    return link;
}

static void add(struct vgpu_link **table, struct vgpu_link *link) {
    struct vgpu_link **slot = slot_of(table, link->key);
    link->next = *slot;
    *slot = link;
}

static struct vgpu_link *take(struct vgpu_link **table, uint64_t key) {
    struct vgpu_link **at = slot_of(table, key);
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    struct vgpu_link *link = *at;
    if (link)
        *at = link->next;
    return link;
}

void vgpu_block_drop(struct vgpu_block *block) {
    if (--block->references)
        return;
    while (block->bound) {
        struct vgpu_bound *bound = block->bound;
        block->bound = bound->next;
        vgpu_block_drop(bound->block);
        free(bound);
    }
    while (block->supplements) {
        struct vgpu_supplement *supplement = block->supplements;
        block->supplements = supplement->next;
        block->charged -= supplement->bytes;
        vgpu_uncharge(supplement->ticket, supplement->bytes);
        free(supplement);
    }
    if (block->charged)
        vgpu_uncharge(block->ticket, block->charged);
    if (block->spilled) {
        vgpu_uncharge(block->where, block->charged);
        atomic_fetch_sub(&vgpu_blocks_spilled, 1);
    }
    free(block);
}

/* Lock held. Releases blocks whose exported descriptors the program has closed; returns whether there were any. */
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
        vgpu_block_drop(exported->block);
        free(exported);
        any = true;
    }
    errno = kept;
    return any;
}

bool vgpu_block_pay(const struct vgpu_block *block, uint64_t offset, uint64_t size, struct vgpu_payment *payment) {
    uint64_t end;
    *payment = (struct vgpu_payment){0};
    if (block->kind != VGPU_BLOCK_OF_UNKNOWN_SIZE || __builtin_add_overflow(offset, size, &end) ||
        end <= block->charged)
        return true;
    settle_exports(); /* no other thread can do this while the lock is held */
    struct vgpu_supplement *supplement = calloc(1, sizeof *supplement);
    if (!supplement)
        return false;
    supplement->bytes = end - block->charged;
    const enum vgpu_verdict verdict =
        vgpu_reserve(vgpu_card_of_device(block->device), supplement->bytes, &supplement->ticket);
    if (verdict == VGPU_CHARGED)
        payment->supplement = supplement;
    else
        free(supplement);
    return verdict != VGPU_REFUSED;
}

void vgpu_block_paid(struct vgpu_block *block, const struct vgpu_payment *payment, CUresult result) {
    struct vgpu_supplement *supplement = payment->supplement;
    if (!supplement)
        return;
    if (result != CUDA_SUCCESS) {
        vgpu_uncharge(supplement->ticket, supplement->bytes);
        free(supplement);
        return;
    }
    supplement->next = block->supplements;
    block->supplements = supplement;
    block->charged += supplement->bytes;
}

static __attribute__((noinline)) bool give_back(void) {
    if (locked)
        return false;
    vgpu_blocks_lock();
    bool any = settle_exports();
    vgpu_blocks_unlock();
    return any;
}

bool vgpu_blocks_give_back(void) {
    return __builtin_expect(__atomic_load_n(&exports, __ATOMIC_RELAXED) != NULL, 0) && give_back();
}

struct vgpu_link *vgpu_block_around(uint64_t address) {
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct vgpu_link *m = mappings[i]; m; m = m->next)
            if (address >= m->key && address - m->key < m->size)
                return m;
    return NULL;
}

struct vgpu_link *vgpu_block_handle(CUmemGenericAllocationHandle handle) {
    return find(handles, handle);
}

void vgpu_block_add_handle(struct vgpu_link *link) {
    add(handles, link);
}

/* Reads the program's arguments once, because another thread may write them, and books the driver's answer before the
 * program can see it. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUDA_REAL(cuMemRelease);
    vgpu_blocks_lock();
    settle_exports();
    CUresult result = real(handle);
    struct vgpu_link *link = result == CUDA_SUCCESS ? find(handles, handle) : NULL;
    if (link)
        vgpu_block_drop(link->block);
    if (link && --link->count == 0)
        free(take(handles, handle));
    vgpu_blocks_unlock();
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    CUDA_REAL(cuMemMap);
    struct vgpu_link *mapping = calloc(1, sizeof *mapping);
    vgpu_blocks_lock();
    struct vgpu_link *link = find(handles, handle);
    struct vgpu_payment payment = {0};
    /* without a record the block would be on the card uncharged after its handle is released */
    bool may = !link || (mapping && vgpu_block_pay(link->block, offset, size, &payment));
    CUresult result = may ? real(address, size, offset, handle, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (link && may)
        vgpu_block_paid(link->block, &payment, result);
    if (result == CUDA_SUCCESS && link) {
        *mapping = (struct vgpu_link){.key = address, .size = size, .block = link->block};
        link->block->references++;
        add(mappings, mapping);
        mapping = NULL;
    }
    vgpu_blocks_unlock();
    free(mapping);
    return result;
}

/* One call may unmap several adjacent mappings, but only whole ones. */
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUDA_REAL(cuMemUnmap);
    vgpu_blocks_lock();
    CUresult result = real(address, size);
    for (uint64_t at = address, end = address + size; result == CUDA_SUCCESS && at < end;) {
        struct vgpu_link *mapping = take(mappings, at);
        at += mapping ? mapping->size : GRANULARITY; /* a mapping unknown here, or a gap that the driver allows */
        if (mapping)
            vgpu_block_drop(mapping->block);
        free(mapping);
    }
    vgpu_blocks_unlock();
    return result;
}

/* A new handle, or one more reference to an old handle, of the block mapped around an address. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUDA_REAL(cuMemRetainAllocationHandle);
    if (vgpu_tier_any() && vgpu_tier_find((CUdeviceptr)(uintptr_t)address) != VGPU_TIER_NONE)
        return CUDA_ERROR_INVALID_VALUE; /* the tier has mapped this, not the program, so the program has no handle */
    struct vgpu_link *fresh = calloc(1, sizeof *fresh);
    CUmemGenericAllocationHandle made = 0;
    vgpu_blocks_lock();
    CUresult result = real(handle ? &made : NULL, address);
    struct vgpu_link *mapping = result == CUDA_SUCCESS ? vgpu_block_around((uint64_t)(uintptr_t)address) : NULL;
    struct vgpu_link *link = mapping ? find(handles, made) : NULL;
    if (mapping && !link && fresh) {
        *fresh = (struct vgpu_link){.key = made, .block = mapping->block};
        add(handles, fresh);
        link = fresh;
        fresh = NULL;
    }
    if (link) {
        link->count++;
        link->block->references++;
    } else if (mapping) { /* an unrecorded reference would keep the memory after every other reference is gone */
        if (DRIVER(cuMemRelease))
            DRIVER(cuMemRelease)(made);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *handle = made;
    vgpu_blocks_unlock();
    free(fresh);
    return result;
}

static CUresult export_as_file(__typeof__(&cuMemExportToShareableHandle) real, int *shareable,
                               CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct exported *exported = malloc(sizeof *exported);
    int file = -1, kept;
    struct stat status;
    vgpu_blocks_lock();
    settle_exports();
    struct vgpu_link *link = find(handles, handle);
    CUresult result = link && !exported ? CUDA_ERROR_OUT_OF_MEMORY
                                        : real(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, flags);
    kept = errno;
    if (result == CUDA_SUCCESS && link && fstat(file, &status) == 0) {
        *exported = (struct exported){exports, link->block, file, status.st_dev, status.st_ino};
        exports = exported;
        link->block->references++;
        exported = NULL;
    }
    if (result == CUDA_SUCCESS)
        *shareable = file;
    errno = kept;
    vgpu_blocks_unlock();
    free(exported);
    return result;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    CUDA_REAL(cuMemExportToShareableHandle);
    return shareable && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
               ? export_as_file(real, shareable, handle, flags)
               : real(shareable, handle, type, flags);
}

/* Lock held. Charges imported memory that this process did not hold. The process that made the memory may release it at
 * any time, and then the memory stays on the card for this process. No driver call tells which other processes hold the
 * memory. */
static CUresult charge_imported(CUmemGenericAllocationHandle handle, struct vgpu_block *block, struct vgpu_link *link) {
    struct vgpu_imported memory;
    enum vgpu_import kind = block && link ? vgpu_imported(handle, &memory) : VGPU_IMPORT_UNREADABLE;
    if (kind == VGPU_IMPORT_HOST)
        return CUDA_SUCCESS;
    struct vgpu_ticket ticket = {0};
    if (kind == VGPU_IMPORT_UNREADABLE ||
        (kind == VGPU_IMPORT_SIZED &&
         vgpu_reserve(vgpu_card_of_device(memory.device), memory.bytes, &ticket) != VGPU_CHARGED))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *block =
        (struct vgpu_block){.kind = kind == VGPU_IMPORT_SIZED ? VGPU_BLOCK_OF_KNOWN_SIZE : VGPU_BLOCK_OF_UNKNOWN_SIZE,
                            .charged = memory.bytes,
                            .ticket = ticket,
                            .device = memory.device,
                            .references = 1};
    *link = (struct vgpu_link){.key = handle, .count = 1, .block = block};
    add(handles, link);
    return CUDA_SUCCESS;
}

/* Memory of this process comes back under its own handle. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    CUDA_REAL(cuMemImportFromShareableHandle);
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return real(handle, shareable, type);
    struct vgpu_block *block = calloc(1, sizeof *block);
    struct vgpu_link *fresh = calloc(1, sizeof *fresh);
    CUmemGenericAllocationHandle made = 0;
    vgpu_blocks_lock();
    settle_exports();
    CUresult result = real(handle ? &made : NULL, shareable, type);
    struct vgpu_link *link = result == CUDA_SUCCESS ? find(handles, made) : NULL;
    if (link) {
        link->count++;
        link->block->references++;
    } else if (result == CUDA_SUCCESS) {
        result = charge_imported(made, block, fresh);
        if (result != CUDA_SUCCESS && DRIVER(cuMemRelease))
            DRIVER(cuMemRelease)(made);
    }
    if (result == CUDA_SUCCESS)
        *handle = made;
    bool kept = fresh && fresh->block;
    vgpu_blocks_unlock();
    if (!kept) {
        free(block);
        free(fresh);
    }
    return result;
}
