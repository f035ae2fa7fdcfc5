/* Slots of a region: takes a slot, tells whether its holder lives, and frees what dead processes have left. */
#ifndef VGPU_SLOTS_H
#define VGPU_SLOTS_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "region/liveness.h"
#include "vgpu/region.h"

#define VGPU_NO_SLOT VGPU_SLOTS
/* The last slots are for processes that only reap: even if dead processes hold all other slots, a reaper must find
 * one. */
#define VGPU_RESERVED_SLOTS 8u

/* One participant: a process of the container, or the agent. Threads that share a member need a lock of their own. */
struct vgpu_member {
    struct vgpu_usage_file *usage;
    const char *path; /* of the usage file, to open it again if the program has closed `fd` */
    /* an open file description of its own on the usage file, close-on-exec; -1: private memory, for this process alone
     */
    int fd;
    /* of `fd`: after a program has closed all descriptors, the number may belong to another file */
    dev_t device;
    ino_t inode;
    struct vgpu_process_list list; /* for the current pass over the slots */
    struct vgpu_mapped_file file;  /* how /proc names the mapping; found at first use */
    bool passes;                   /* `fd` is inherited by exec, as the driver's files are */
    bool inherited;                /* locks of other slots came with inherited device files */
    uint32_t slot;                 /* VGPU_NO_SLOT: none */
    uint32_t generation;
};

/* Joins a mapped usage file through `fd`: 0 or a negative errno. On an error `fd` stays the caller's. fd -1 and path
 * NULL: private memory. */
int vgpu_member_join(struct vgpu_member *member, struct vgpu_usage_file *usage, const char *path, int fd);
/* Marks slots that this process took before exec: pid, start time and soon the mapping are the same again, but the old
 * program's memory is gone. Exception: the process inherited device files of the driver (device_files.h has marked
 * them). Call once, before taking a slot. */
void vgpu_member_disown(struct vgpu_member *member);
/* Lets the lock of the member's slot be inherited wherever open device files of the driver are: by programs that this
 * process, or a child, executes. */
void vgpu_member_pass_on(struct vgpu_member *member);
/* In a forked child: joins with an open file description of its own, so that its slot differs from its parent's. */
int vgpu_member_rejoin(struct vgpu_member *child, const struct vgpu_member *parent);

/* Takes a slot: 0; -ENOSPC: living processes hold all slots; or a negative errno. flags: enum vgpu_slot_flag. */
int vgpu_slot_take(struct vgpu_member *member, uint32_t flags);
/* For the agent, when it charges. Takes no reserved slot: a process that finds a reserved slot unlocked takes it
 * without settling it. */
int vgpu_slot_take_to_charge(struct vgpu_member *member);
/* Returns the member's own slot; no charges may be left in it. */
void vgpu_slot_give_back(struct vgpu_member *member);
/* Whether the holder is dead: the lock is free, and the process no longer maps the usage file. */
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
