/* Is the process that took a slot still there? What /proc says, for callers in the same pid namespace and for an agent
 * that sees them all. */
#ifndef VGPU_LIVENESS_H
#define VGPU_LIVENESS_H
#include <stdbool.h>
#include <stdint.h>

struct vgpu_identity {
    int32_t pid;            /* as the process itself sees it */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid; 0: unknown */
    uint64_t start_time;    /* clock ticks since boot, /proc/PID/stat field 22; 0: unknown */
};

/* A mapped file as /proc/PID/maps names it (on some file systems other numbers than stat's). inode 0: unknown. */
struct vgpu_mapped_file {
    uint64_t device;
    uint64_t inode;
};

/* Processes of other pid namespaces that this one can see, listed once per pass over the slots: a container may fill
 * its slots with anything, and must not make an agent read all of /proc for each. Empty ({0}) before the pass. */
struct vgpu_process_list {
    struct vgpu_listed_process {
        uint64_t pid_namespace;
        int32_t pid; /* as seen from here */
    } *processes;
    uint32_t count;
    bool listed;
};

void vgpu_process_list_free(struct vgpu_process_list *list);

/* The calling process. */
struct vgpu_identity vgpu_identity_self(void);
/* The file that the calling process has mapped at `address`. */
struct vgpu_mapped_file vgpu_mapped_file_at(const void *address);
/* The process has the file mapped, or has device files of the driver open (another program runs in it now, which
 * inherited them), or may not be looked into by this one, or is ending and the driver may still be freeing what it
 * held: the kernel takes a dying process's memory, then its descriptors, then makes it a zombie. False also when it
 * cannot be found (other namespace). */
bool vgpu_process_holds(const struct vgpu_identity *process, const struct vgpu_mapped_file *file,
                        struct vgpu_process_list *list);
/* The process, which runs another program now, has device files of the driver open: inherited ones, as far as the
 * process itself asks. */
bool vgpu_process_keeps(const struct vgpu_identity *process, struct vgpu_process_list *list);
/* The process has certainly ended, although children may hold what it held. */
bool vgpu_process_ended(const struct vgpu_identity *process, struct vgpu_process_list *list);
#endif
