/* Memory of one process in another, by a handle that travels as plain bytes (cuIpc*). The exporter holds and pays for
 * the memory. Its contents are in DIR/shared.SLOT.GENERATION.BLOCK, which every importer maps. A handle is valid while
 * its exporter lives and has not freed the memory. An importer's mapping keeps the contents longer. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"

#define MAGIC 0x7663697067707576ull

struct handle {
    uint64_t magic, block, size;
    uint32_t slot, generation, card;
};
_Static_assert(sizeof(struct handle) <= CU_IPC_HANDLE_SIZE, "an IPC handle is of fixed size");

static struct import {
    struct import *next;
    struct handle handle;
    CUcontext context;
    CUdeviceptr address;
    unsigned count;
} *imports; /* protected by driver.lock */

static void path_of(const struct handle *handle, char path[300]) {
    snprintf(path, 300, "%s/shared.%u.%u.%llu", driver.sim.dir, handle->slot, handle->generation,
             (unsigned long long)handle->block);
}

static bool exporter_lives(const struct handle *handle) {
    if (handle->slot >= SIM_SLOTS)
        return false;
    uint64_t owner = (uint64_t)handle->generation << 2 | SIM_LIVE;
    return atomic_load(&driver.sim.state->slots[handle->slot].owner) == owner && sim_alive(&driver.sim, handle->slot);
}

static bool own(const struct handle *handle) {
    return handle->slot == driver.sim.slot && handle->generation == driver.sim.generation;
}

/* Removes the files of dead exporters, or those of this process. */
static void sweep(bool mine) {
    DIR *dir = opendir(driver.sim.dir);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        struct handle handle = {0};
        unsigned long long block;
        if (sscanf(entry->d_name, "shared.%u.%u.%llu", &handle.slot, &handle.generation, &block) == 3 &&
            (mine ? own(&handle) : !exporter_lives(&handle)))
            unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir)
        closedir(dir);
}

static bool exported; /* protected by driver.lock */

__attribute__((destructor)) static void leave(void) {
    /* not in a forked child, because its parent still uses the files */
    if (exported && driver.sim.self && driver.sim.self->pid == (int32_t)getpid())
        sweep(true);
}

static struct handle handle_of(const struct block *block) {
    return (struct handle){.magic = MAGIC,
                           .block = block->id,
                           .size = block->size,
                           .slot = driver.sim.slot,
                           .generation = driver.sim.generation,
                           .card = (uint32_t)block->context->card};
}

void ipc_forget(const struct block *block) {
    char path[300];
    struct handle handle = handle_of(block);
    path_of(&handle, path);
    unlink(path);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    ENTER();
    CUdeviceptr base;
    struct block *block = out ? block_find(address, &base) : NULL;
    if (!block || block->kind != BLOCK_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle handle = handle_of(block);
    char *pages;
    size_t length;
    /* from now on the pages keep their address */
    CUresult result = view(block->context->device, base, block->size, true, &pages, &length);
    pthread_mutex_lock(&driver.lock);
    if (!result && !block->shared) {
        char path[300];
        if (!exported)
            sweep(false);
        exported = true;
        path_of(&handle, path);
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0)
            (void)fchmod(fd, 0666); /* programs of other users share the cards */
        if (fd < 0 || !shared_move(fd, 0, &block->contents, block->size))
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else
            block->shared = true;
        if (fd >= 0)
            close(fd);
        if (result)
            unlink(path);
    }
    pthread_mutex_unlock(&driver.lock);
    if (!result) {
        memset(out, 0, sizeof *out);
        memcpy(out, &handle, sizeof handle);
    }
    return result;
}

static bool reachable(CUcontext context, int card) {
    return context->card == card || driver.sim.profile->nvlinks > 0;
}

static CUresult map(const struct handle *handle, CUcontext context, CUdeviceptr *out) {
    char path[300];
    struct stat st;
    path_of(handle, path);
    int fd = exporter_lives(handle) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    bool whole = handle->size && fstat(fd, &st) == 0 && (uint64_t)st.st_size >= handle->size;
    char *contents = whole ? shared_map(fd, 0, handle->size) : NULL;
    close(fd);
    CUdeviceptr address = contents ? block_new(handle->size, context, BLOCK_IMPORTED, NULL) : 0;
    if (!address) {
        if (contents)
            munmap(contents, handle->size);
        return whole ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
    }
    block_contents(address, contents);
    *out = address;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle opaque, unsigned int flags) {
    ENTER_CONTEXT(context);
    struct handle handle;
    memcpy(&handle, &opaque, sizeof handle);
    if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.magic != MAGIC || handle.card >= driver.sim.state->card_count)
        return CUDA_ERROR_INVALID_HANDLE;
    if (own(&handle))
        return CUDA_ERROR_INVALID_CONTEXT; /* the memory belongs to this process itself */
    int device = 0;
    while (device < driver.count && driver.visible[device] != (int)handle.card)
        device++;
    if (device == driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!reachable(context, (int)handle.card))
        return CUDA_ERROR_MAP_FAILED;
    pthread_mutex_lock(&driver.lock);
    CUresult result = CUDA_SUCCESS;
    struct import *import = imports;
    while (import && (import->context != context || memcmp(&import->handle, &handle, sizeof handle) != 0))
        import = import->next;
    if (!import) {
        import = calloc(1, sizeof *import);
        result = import ? map(&handle, context, &import->address) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result) {
            free(import);
        } else {
            import->handle = handle;
            import->context = context;
            import->next = imports;
            imports = import;
        }
    }
    if (!result) {
        import->count++;
        *out = import->address;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    INJECT();
    return cuIpcOpenMemHandle_v2(out, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct block block;
    pthread_mutex_lock(&driver.lock);
    for (struct import **at = &imports; *at; at = &(*at)->next)
        if ((*at)->address == address) {
            struct import *import = *at;
            result = CUDA_SUCCESS;
            if (!--import->count) {
                block_take(address, BLOCK_IMPORTED, &block);
                *at = import->next;
                free(import);
            }
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

int ipc_card(CUdeviceptr base) {
    int card = -1;
    pthread_mutex_lock(&driver.lock);
    for (struct import *import = imports; import && card < 0; import = import->next)
        if (import->address == base)
            card = (int)import->handle.card;
    pthread_mutex_unlock(&driver.lock);
    return card;
}

void imports_of_context_drop(CUcontext context) {
    pthread_mutex_lock(&driver.lock);
    for (struct import **at = &imports; *at;) {
        struct import *import = *at;
        if (import->context == context) {
            *at = import->next;
            free(import);
        } else {
            at = &import->next;
        }
    }
    pthread_mutex_unlock(&driver.lock);
}
