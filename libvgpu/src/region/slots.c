/* Takes slots, and frees the slots of dead processes. */
#include "region/slots.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/account.h"
#include "region/death.h"
#include "region/device_files.h"
#include "region/region_files.h"

/* Values of the kernel interface (fcntl(2)); old headers lack them without _GNU_SOURCE. */
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define OWNER(generation, state) ((uint64_t)(generation) << 2 | (state))
#define ORDINARY_SLOTS (VGPU_SLOTS - VGPU_RESERVED_SLOTS)
#define MOST_OWED_NS 10000000000u        /* most GPU time that a dead process owes */
#define MOST_OWED_SETTLED_NS 1000000000u /* most GPU time owed for launches that have paid the mean of their kind */
#define GENERATION(owner) ((owner) >> 2)

static struct flock slot_lock(uint32_t slot, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = VGPU_LOCK_SLOT(slot), .l_len = 1};
}

static bool is_usage_file(const struct vgpu_member *member, int fd) {
    struct stat status;
    return fd >= 0 && fstat(fd, &status) == 0 && status.st_dev == member->device && status.st_ino == member->inode;
}

/* Returns the member's descriptor, opened again if the program closed it; -1: it cannot be opened. Takes a lock again
 * that was lost with the old descriptor. */
static int lock_file(struct vgpu_member *member) {
    if (is_usage_file(member, member->fd))
        return member->fd;
    int fd = open(member->path, O_RDWR | (member->passes ? 0 : O_CLOEXEC));
    if (!is_usage_file(member, fd)) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    member->fd = fd;
    if (member->slot != VGPU_NO_SLOT) {
        struct flock lock = slot_lock(member->slot, F_WRLCK);
        fcntl(fd, F_OFD_SETLK, &lock); /* refused only while a child holds the old lock, which is as good */
    }
    return fd;
}

static bool same_process(const struct vgpu_slot_head *head, const struct vgpu_identity *process) {
    return process->start_time != 0 && atomic_load(&head->pid) == process->pid &&
           atomic_load(&head->pid_namespace) == process->pid_namespace &&
           atomic_load(&head->start_time) == process->start_time;
}

static uint32_t slots_high(const struct vgpu_usage_file *usage) {
    const uint32_t high = atomic_load_explicit(&usage->slots_high, memory_order_acquire);
    return high < VGPU_SLOTS ? high : VGPU_SLOTS;
}

int vgpu_member_join(struct vgpu_member *member, struct vgpu_usage_file *usage, const char *path, int fd) {
    struct stat status = {0};
    if (fd >= 0 && fstat(fd, &status) != 0)
        return -errno;
    *member = (struct vgpu_member){
        .usage = usage, .path = path, .fd = fd, .device = status.st_dev, .inode = status.st_ino, .slot = VGPU_NO_SLOT};
    return 0;
}

static bool mark_lock(int fd, void *context) {
    struct vgpu_member *member = context;
    const int flags = fcntl(fd, F_GETFD);
    if (fd != member->fd && flags >= 0 && !(flags & FD_CLOEXEC) && is_usage_file(member, fd) && vgpu_inherited_mark(fd))
        member->inherited = true;
    return false;
}

static bool drop_lock(int fd, void *context) {
    const struct vgpu_member *member = context;
    if (fd != member->fd && is_usage_file(member, fd) && vgpu_inherited_marked(fd))
        close(fd);
    return false;
}

/* Locks that were inherited together with device files are useless without the files: drops them. */
static void drop_locks(struct vgpu_member *member) {
    if (!member->inherited || vgpu_device_files_marked())
        return;
    vgpu_descriptors_any(drop_lock, member);
    member->inherited = false;
}

void vgpu_member_pass_on(struct vgpu_member *member) {
    const int fd = member->path && !member->passes && vgpu_device_files_pass() ? lock_file(member) : -1;
    if (fd >= 0)
        member->passes = fcntl(fd, F_SETFD, 0) == 0;
}

void vgpu_member_disown(struct vgpu_member *member) {
    const struct vgpu_identity self = vgpu_identity_self();
    vgpu_descriptors_any(mark_lock, member);
    drop_locks(member);
    for (uint32_t slot = 0; slot < slots_high(member->usage); slot++) {
        if (vgpu_slot_state(vgpu_slot_owner(member->usage, slot)) == VGPU_SLOT_FREE ||
            !same_process(&member->usage->heads[slot], &self))
            continue;
        atomic_fetch_or(&member->usage->heads[slot].flags,
                        VGPU_SLOT_REPLACED | (vgpu_device_files_marked() ? VGPU_SLOT_KEPT : 0));
    }
}

int vgpu_member_rejoin(struct vgpu_member *child, const struct vgpu_member *parent) {
    char path[32];
    int fd = -1;
    if (is_usage_file(parent, parent->fd)) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", parent->fd);
        fd = open(path, O_RDWR | O_CLOEXEC);
    }
    if (fd < 0)
        fd = open(parent->path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (!is_usage_file(parent, fd)) {
        close(fd);
        return -ESTALE;
    }
    *child = *parent;
    child->fd = fd;
    child->passes = false;
    child->slot = VGPU_NO_SLOT;
    return 0;
}

static void raise_high(struct vgpu_usage_file *usage, uint32_t high) {
    uint32_t seen = atomic_load(&usage->slots_high);
    while (seen < high && !atomic_compare_exchange_weak(&usage->slots_high, &seen, high))
        ;
}

/* Allocates disk space for a slot: a slot is a hole of the file until it is first taken. On a full file system,
 * touching the hole would end the process. */
static int back(int fd, uint32_t slot) {
    return vgpu_file_back(fd, offsetof(struct vgpu_usage_file, slots) + slot * sizeof(struct vgpu_slot),
                          sizeof(struct vgpu_slot));
}

static bool take(struct vgpu_member *member, int fd, uint32_t slot, uint32_t flags) {
    struct vgpu_slot_head *head = &member->usage->heads[slot];
    struct flock lock = slot_lock(slot, F_WRLCK);
    uint64_t owner = vgpu_slot_owner(member->usage, slot);
    /* A reserved slot never holds charges, so the process that gets its lock may take it, whatever its dead holder left
     * there. */
    const bool takeable = vgpu_slot_state(owner) == VGPU_SLOT_FREE || (slot >= ORDINARY_SLOTS && fd >= 0);
    if (!takeable || (fd >= 0 && (back(fd, slot) != 0 || fcntl(fd, F_OFD_SETLK, &lock) != 0)))
        return false;
    DEATH_POINT();
    /* Raise the highest slot number before taking the slot. In the other order, if this process died in between, no
     * other process would find the slot. */
    raise_high(member->usage, slot + 1);
    const uint64_t generation = GENERATION(owner) + 1;
    if (!atomic_compare_exchange_strong(&head->owner, &owner, OWNER(generation, VGPU_SLOT_CLAIMED))) {
        lock = slot_lock(slot, F_UNLCK);
        if (fd >= 0)
            fcntl(fd, F_OFD_SETLK, &lock);
        return false;
    }
    DEATH_POINT();
    const struct vgpu_identity self = vgpu_identity_self();
    atomic_store(&head->flags, flags);
    atomic_store(&head->pid_namespace, self.pid_namespace);
    atomic_store(&head->start_time, self.start_time);
    atomic_store(&head->pid, self.pid);
    DEATH_POINT();
    atomic_store(&head->owner, OWNER(generation, VGPU_SLOT_LIVE));
    DEATH_POINT();
    member->slot = slot;
    member->generation = (uint32_t)generation;
    return true;
}

static bool take_one_of(struct vgpu_member *member, int fd, uint32_t first, uint32_t end, uint32_t flags) {
    for (uint32_t slot = first; slot < end; slot++)
        if (take(member, fd, slot, flags))
            return true;
    return false;
}

int vgpu_slot_take(struct vgpu_member *member, uint32_t flags) {
    const int fd = member->path ? lock_file(member) : -1;
    if (member->path && fd < 0)
        return -EBADF;
    if (!(flags & VGPU_SLOT_AGENT) && take_one_of(member, fd, 0, ORDINARY_SLOTS, flags))
        return 0;
    if (!take_one_of(member, fd, ORDINARY_SLOTS, VGPU_SLOTS, flags | VGPU_SLOT_AGENT))
        return -ENOSPC;
    if (flags & VGPU_SLOT_AGENT)
        return 0;
    unsigned busy;
    vgpu_slots_reap(member, &busy);
    vgpu_slot_give_back(member);
    return take_one_of(member, fd, 0, ORDINARY_SLOTS, flags) ? 0 : -ENOSPC;
}

int vgpu_slot_take_to_charge(struct vgpu_member *member) {
    const int fd = member->path ? lock_file(member) : -1;
    if (member->path && fd < 0)
        return -EBADF;
    return take_one_of(member, fd, 0, ORDINARY_SLOTS, VGPU_SLOT_AGENT) ? 0 : -ENOSPC;
}

static void forget_identity(struct vgpu_usage_file *usage, uint32_t slot) {
    struct vgpu_slot_head *head = &usage->heads[slot];
    atomic_store(&head->pid, 0);
    atomic_store(&head->start_time, 0);
    atomic_store(&head->flags, 0);
}

void vgpu_slot_give_back(struct vgpu_member *member) {
    if (member->slot == VGPU_NO_SLOT)
        return;
    struct flock lock = slot_lock(member->slot, F_UNLCK);
    forget_identity(member->usage, member->slot);
    atomic_store(&member->usage->heads[member->slot].owner,
                 OWNER(GENERATION(vgpu_slot_owner(member->usage, member->slot)), VGPU_SLOT_FREE));
    DEATH_POINT();
    if (is_usage_file(member, member->fd))
        fcntl(member->fd, F_OFD_SETLK, &lock);
    member->slot = VGPU_NO_SLOT;
}

static struct vgpu_identity identity_of(const struct vgpu_slot_head *head) {
    return (struct vgpu_identity){.pid = atomic_load(&head->pid),
                                  .pid_namespace = atomic_load(&head->pid_namespace),
                                  .start_time = atomic_load(&head->start_time)};
}

bool vgpu_slot_dead(struct vgpu_member *member, uint32_t slot) {
    const struct vgpu_slot_head *head = &member->usage->heads[slot];
    struct flock lock = slot_lock(slot, F_WRLCK);
    const int fd = lock_file(member);
    if (slot == member->slot || fd < 0 || fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK)
        return false;
    const uint32_t flags = atomic_load(&head->flags);
    const struct vgpu_identity holder = identity_of(head);
    if (flags & VGPU_SLOT_AGENT)
        return true;
    if (flags & VGPU_SLOT_REPLACED)
        return !(flags & VGPU_SLOT_KEPT) || !vgpu_process_keeps(&holder, &member->list);
    if (member->file.inode == 0)
        member->file = vgpu_mapped_file_at(member->usage);
    return !vgpu_process_holds(&holder, &member->file, &member->list);
}

/* No process will go on with this claim. Stricter than a dead slot: children that hold a killed reaper's lock keep the
 * reaper's memory, but do not continue the reaper's work. */
static bool claim_abandoned(struct vgpu_member *member, uint64_t claim) {
    const uint32_t slot = (uint32_t)claim;
    if (slot >= VGPU_SLOTS || slot == member->slot)
        return true;
    const uint64_t owner = vgpu_slot_owner(member->usage, slot);
    if (vgpu_slot_state(owner) == VGPU_SLOT_FREE || (uint32_t)GENERATION(owner) != (uint32_t)(claim >> 32))
        return true;
    const struct vgpu_slot_head *head = &member->usage->heads[slot];
    const struct vgpu_identity holder = identity_of(head);
    return vgpu_slot_dead(member, slot) || (atomic_load(&head->flags) & VGPU_SLOT_REPLACED) ||
           vgpu_process_ended(&holder, &member->list);
}

/* Charges the work that the process had under way when it ended, which was never measured. The time of death is unknown
 * and may be long ago. So the debt is bounded: otherwise a container that has used nothing since would wait for no
 * reason. A reaper that dies in here has charged the debt once or not at all. */
static void charge_owed(struct vgpu_usage_file *usage, uint32_t slot, unsigned card, uint64_t now) {
    struct vgpu_pacer_card *pacer = &usage->pacer[card];
    const uint64_t since = atomic_exchange(&usage->slots[slot].owed[card].since_ns, 0);
    const uint64_t paid = atomic_exchange(&usage->slots[slot].owed[card].paid_ns, 0);
    const uint32_t percent = atomic_load(&pacer->percent);
    uint64_t owed = since && now > since ? now - since : 0;
    const uint64_t most = since & VGPU_OWED_SETTLED ? MOST_OWED_SETTLED_NS : MOST_OWED_NS;
    owed = owed < most ? owed : most;
    owed = owed > paid ? owed - paid : 0;
    atomic_fetch_add(&pacer->gpu_ns, owed);
    if (percent)
        atomic_fetch_add(&pacer->tat, owed * 100 / percent);
}

static void settle(struct vgpu_usage_file *usage, uint32_t slot) {
    const uint64_t now = vgpu_now_ns();
    for (uint32_t lane = 0; lane < VGPU_LANES; lane++)
        for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
            for (unsigned account = 0; account < VGPU_ACCOUNTS; account++)
                vgpu_account_settle(usage, card, account, VGPU_LANE_NUMBER(slot, lane));
    struct vgpu_slot *body = &usage->slots[slot];
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        charge_owed(usage, slot, card, now);
        for (unsigned kind = 0; kind < VGPU_KINDS; kind++)
            atomic_store_explicit(&body->by_kind[card][kind], 0, memory_order_relaxed);
        atomic_store_explicit(&body->gpu_ns[card], 0, memory_order_relaxed);
        atomic_store_explicit(&body->throttled_ns[card], 0, memory_order_relaxed);
        atomic_store_explicit(&body->launches[card], 0, memory_order_relaxed);
    }
}

static bool reap(struct vgpu_member *member, uint32_t slot, unsigned *busy) {
    struct vgpu_slot_head *head = &member->usage->heads[slot];
    const uint64_t mine = (uint64_t)member->generation << 32 | member->slot;
    uint64_t owner = vgpu_slot_owner(member->usage, slot);
    if (vgpu_slot_state(owner) == VGPU_SLOT_FREE || !vgpu_slot_dead(member, slot))
        return false;
    DEATH_POINT();
    uint64_t claim = atomic_load(&head->reaper);
    if ((claim != 0 && !claim_abandoned(member, claim)) ||
        !atomic_compare_exchange_strong(&head->reaper, &claim, mine)) {
        ++*busy;
        return false;
    }
    DEATH_POINT();
    /* From here on no other process can free the slot. But it may have been freed, or even taken again, before the
     * claim. */
    const bool unchanged = vgpu_slot_owner(member->usage, slot) == owner;
    if (unchanged) {
        settle(member->usage, slot);
        forget_identity(member->usage, slot);
        DEATH_POINT();
        atomic_compare_exchange_strong(&head->owner, &owner, OWNER(GENERATION(owner), VGPU_SLOT_FREE));
        DEATH_POINT();
    }
    /* Comes last: if the claim were dropped earlier, a second reaper could settle the lanes of the slot's next holder.
     */
    uint64_t own = mine;
    atomic_compare_exchange_strong(&head->reaper, &own, 0);
    return unchanged;
}

int vgpu_slots_reap(struct vgpu_member *member, unsigned *busy) {
    int freed = 0;
    *busy = 0;
    if (!member->path)
        return 0;
    drop_locks(member);
    for (uint32_t slot = 0; slot < slots_high(member->usage); slot++)
        if (slot != member->slot && reap(member, slot, busy))
            freed++;
    vgpu_process_list_free(&member->list);
    return freed;
}
