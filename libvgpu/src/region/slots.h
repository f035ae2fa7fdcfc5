/* Slots of a region: taking one, telling whether its holder lives, freeing what the dead have left. */
#ifndef VGPU_SLOTS_H
#define VGPU_SLOTS_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "region/liveness.h"
#include "vgpu/region.h"

#define VGPU_NO_SLOT VGPU_SLOTS
/* The last slots are for those who only reap: with every other slot in the hands of the dead, somebody must still find
 * one. */
#define VGPU_RESERVED_SLOTS 8u

/* One participant: a process of the container, or the agent. Not shared between threads without a lock of the caller's.
 */
struct vgpu_member {
    struct vgpu_usage_file *usage;
    const char *path; /* of the usage file, to open it again when somebody has closed `fd` */
    /* open description of its own on the usage file, close-on-exec; -1: private memory, nobody else */
    int fd;
    /* of `fd`: a program that closes all descriptors may get the number for another file */
    dev_t device;
    ino_t inode;
    struct vgpu_process_list list; /* of the pass over the slots that is under way */
    struct vgpu_mapped_file file;  /* how /proc names the mapping; found when first needed */
    bool passes;                   /* `fd` is not close-on-exec, as the driver's files are not */
    bool inherited;                /* locks of other slots were inherited with the driver's files */
    uint32_t slot;                 /* VGPU_NO_SLOT: none */
    uint32_t generation;
};

/* Joins a mapped usage file through `fd` (which stays the caller's if this fails): 0 or a negative errno. fd -1 and
 * path NULL: private memory. */
int vgpu_member_join(struct vgpu_member *member, struct vgpu_usage_file *usage, const char *path, int fd);
/* Marks slots that this process took before it went on with another program: pid, start time and soon the mapping are
 * the same again, but the old program's memory is gone, unless the driver's files were inherited (device_files.h, which
 * has marked them). To be called once, before a slot is taken. */
void vgpu_member_disown(struct vgpu_member *member);
/* The lock of the member's slot goes where open device files of the driver go: to programs that this process, or a
 * child, executes. */
void vgpu_member_pass_on(struct vgpu_member *member);
/* In a forked child: joins by an open description of its own, so that its slot and its parent's are told apart. */
int vgpu_member_rejoin(struct vgpu_member *child, const struct vgpu_member *parent);

/* Takes a slot: 0; -ENOSPC: all are taken by the living; or a negative errno. flags: enum vgpu_slot_flag. */
int vgpu_slot_take(struct vgpu_member *member, uint32_t flags);
/* For the agent, when it charges: not one of the reserved slots, which whoever finds them unlocked takes without
 * settling them. */
int vgpu_slot_take_to_charge(struct vgpu_member *member);
/* Gives the own slot back; nothing may be charged in it. */
void vgpu_slot_give_back(struct vgpu_member *member);
/* Dead: the lock is free and the process does not run with the usage file mapped any more. */
bool vgpu_slot_dead(struct vgpu_member *member, uint32_t slot);
/* Frees the charges of dead processes; returns how many slots were freed. `busy` counts dead slots that another reaper
 * has claimed. The member must hold a slot. */
int vgpu_slots_reap(struct vgpu_member *member, unsigned *busy);

static inline uint64_t vgpu_slot_owner(const struct vgpu_usage_file *usage, uint32_t slot) {
    return atomic_load_explicit(&usage->heads[slot].owner, memory_order_acquire);
}

static inline enum vgpu_slot_state vgpu_slot_state(uint64_t owner) {
    return (enum vgpu_slot_state)(owner & 3);
}
#endif
