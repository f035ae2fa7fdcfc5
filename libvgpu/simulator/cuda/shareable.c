/* Physical memory that several processes hold: shareable handles are file descriptors (cuMemExportToShareableHandle).
 *
 * The file's first page describes the memory, its payer and its holders; the contents follow. One holder pays, at first
 * the creator. The driver frees memory only with its last holder. So if the payer releases the memory while others hold
 * it, the bytes move to one of them. If a payer dies, the next holder that asks the card for memory replaces it
 * (shareable_adopt). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"

#define MAGIC 0x656c626172616873ull
#define CONTENTS 4096u
#define HOLDERS 64

struct holder {
    uint32_t slot, generation; /* generation 0: none */
};

struct shareable {
    uint64_t magic, size;
    int32_t card; /* -1: host */
    int32_t account;
    CUmemAllocationProp properties;
    sim_lock lock;
    struct holder payer, holders[HOLDERS];
};
_Static_assert(sizeof(struct shareable) <= CONTENTS, "the description has one page");

static _Atomic int held; /* number of shareable memories of this process; a process without any skips the check */

static struct holder self(void) {
    return (struct holder){driver.sim.slot, driver.sim.generation};
}

static bool is_self(const struct holder *holder) {
    return holder->generation == driver.sim.generation && holder->slot == driver.sim.slot;
}

static bool lives(const struct holder *holder) {
    if (!holder->generation || holder->slot >= SIM_SLOTS)
        return false;
    uint64_t owner = (uint64_t)holder->generation << 2 | SIM_LIVE;
    return is_self(holder) ||
           (atomic_load(&driver.sim.state->slots[holder->slot].owner) == owner && sim_alive(&driver.sim, holder->slot));
}

static bool join(struct shareable *shareable) {
    for (int i = 0; i < HOLDERS; i++)
        if (!lives(&shareable->holders[i])) {
            shareable->holders[i] = self();
            return true;
        }
    return false;
}

/* With driver.lock held, like all functions below. */
static CUresult make_shareable(struct physical *physical) {
    if (physical->shareable)
        return CUDA_SUCCESS;
    int fd = shared_memory_file("vgpu-simulator");
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    struct shareable *shareable = NULL;
    if (shared_move(fd, CONTENTS, &physical->contents, physical->size))
        shareable = (struct shareable *)shared_map(fd, 0, CONTENTS);
    if (!shareable) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    shareable->size = physical->size;
    shareable->card = physical->card;
    shareable->account = physical->account;
    shareable->properties = physical->properties;
    shareable->payer = self();
    join(shareable);
    shareable->magic = MAGIC;
    physical->shareable = shareable;
    physical->fd = fd;
    held++;
    return CUDA_SUCCESS;
}

static bool give(const struct physical *physical, const struct holder *holder) {
    return physical->card >= 0
               ? sim_transfer(&driver.sim, physical->card, holder->slot, holder->generation, physical->size)
               : sim_host_transfer(&driver.sim, physical->account, holder->slot, holder->generation, physical->size);
}

/* Whether this process must give the bytes back to the card: it paid, and no process holds the memory any more. */
bool shareable_leave(struct physical *physical) {
    struct shareable *shareable = physical->shareable;
    sim_acquire(&driver.sim, &shareable->lock);
    bool paid = is_self(&shareable->payer);
    for (int i = 0; i < HOLDERS; i++)
        if (is_self(&shareable->holders[i]))
            shareable->holders[i] = (struct holder){0};
    for (int i = 0; i < HOLDERS && paid; i++)
        if (lives(&shareable->holders[i]) && give(physical, &shareable->holders[i])) {
            shareable->payer = shareable->holders[i];
            paid = false;
        }
    if (paid)
        shareable->payer = (struct holder){0};
    sim_release(&shareable->lock);
    munmap(shareable, CONTENTS);
    close(physical->fd);
    physical->shareable = NULL;
    held--;
    return paid;
}

/* Pays for memory whose payer is gone; false: the card has no room. */
static CUresult take_over(struct physical *physical) {
    struct shareable *shareable = physical->shareable;
    CUresult result = CUDA_SUCCESS;
    sim_acquire(&driver.sim, &shareable->lock);
    if (!lives(&shareable->payer)) {
        if (physical->card >= 0 && sim_charge(&driver.sim, physical->card, physical->size) != 0)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else
            shareable->payer = self();
        if (physical->card < 0)
            sim_host_add(&driver.sim, physical->account, physical->size);
    }
    sim_release(&shareable->lock);
    return result;
}

static void adopt(void *handle, void *unused) {
    struct physical *physical = handle;
    (void)unused;
    if (physical->shareable)
        take_over(physical);
}

void shareable_adopt(void) {
    if (!held)
        return;
    pthread_mutex_lock(&driver.lock);
    object_each(OBJECT_PHYSICAL, adopt, NULL);
    pthread_mutex_unlock(&driver.lock);
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    ENTER();
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&driver.lock);
    struct physical *physical = physical_of(handle);
    CUresult result = physical && physical->properties.requestedHandleTypes & type ? make_shareable(physical)
                                                                                   : CUDA_ERROR_INVALID_VALUE;
    int fd = result ? -1 : fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
    if (!result && fd < 0)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (!result)
        *(int *)out = fd;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

struct search {
    struct stat st;
    struct physical *found;
};

static void same_file(void *handle, void *argument) {
    struct physical *physical = handle;
    struct search *search = argument;
    struct stat st;
    if (physical->shareable && fstat(physical->fd, &st) == 0 && st.st_ino == search->st.st_ino &&
        st.st_dev == search->st.st_dev)
        search->found = physical;
}

/* The ordinal of a card in this process; -1: not visible. */
static int ordinal_of(int card) {
    for (int i = 0; i < driver.count; i++)
        if (driver.visible[i] == card)
            return i;
    return -1;
}

static CUresult import(int fd, const struct stat *st, struct physical **out) {
    struct shareable *shareable =
        st->st_size > (off_t)CONTENTS ? (struct shareable *)shared_map(fd, 0, CONTENTS) : NULL;
    if (!shareable)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    if (shareable->magic != MAGIC || (uint64_t)st->st_size < CONTENTS + shareable->size)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (shareable->card >= 0 && ordinal_of(shareable->card) < 0)
        result = CUDA_ERROR_INVALID_DEVICE;
    char *contents = result ? NULL : shared_map(fd, CONTENTS, shareable->size);
    struct physical *physical = contents ? object_new(OBJECT_PHYSICAL) : NULL;
    int own = physical ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (own >= 0) {
        physical->properties = shareable->properties;
        if (shareable->card >= 0)
            physical->properties.location.id = ordinal_of(shareable->card);
        physical->card = shareable->card;
        physical->account = shareable->account;
        physical->size = shareable->size;
        physical->contents = contents;
        physical->shareable = shareable;
        physical->fd = own;
        physical->references = physical->handles = 1;
        held++;
        sim_acquire(&driver.sim, &shareable->lock);
        result = join(shareable) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        sim_release(&shareable->lock);
        if (!result)
            result = take_over(physical);
        if (!result) {
            *out = physical;
            return CUDA_SUCCESS;
        }
        shareable_leave(physical);
        shareable = NULL;
    } else if (!result) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (contents)
        munmap(contents, st->st_size - CONTENTS);
    if (physical)
        object_free(physical);
    if (shareable)
        munmap(shareable, CONTENTS);
    return result;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                        CUmemAllocationHandleType type) {
    ENTER();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    int fd = (int)(intptr_t)handle;
    struct search search = {0};
    if (fstat(fd, &search.st) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!driver_register())
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    object_each(OBJECT_PHYSICAL, same_file, &search);
    if (search.found) { /* memory of this process: add one handle */
        search.found->handles++;
        search.found->references++;
    } else {
        result = import(fd, &search.st, &search.found);
    }
    if (!result)
        *out = (CUmemGenericAllocationHandle)(uintptr_t)search.found;
    pthread_mutex_unlock(&driver.lock);
    return result;
}
