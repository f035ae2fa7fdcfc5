/* Tells from /proc whether the process that took a slot still lives. For callers in the same pid namespace, and for an
 * agent that sees all of them. */
#ifndef VGPU_LIVENESS_H
#define VGPU_LIVENESS_H
#include <stdbool.h>
#include <stdint.h>

struct vgpu_identity {
    int32_t pid;            /* as the process itself sees it */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid; 0: unknown */
    uint64_t start_time;    /* clock ticks since boot, /proc/PID/stat field 22; 0: unknown */
};

/* A mapped file as /proc/PID/maps names it (on some file systems the numbers differ from stat's). inode 0: unknown. */
struct vgpu_mapped_file {
    uint64_t device;
    uint64_t inode;
};

/* Visible processes of other pid namespaces, listed once per pass over the slots. A container may fill its slots with
 * any values, and must not make an agent read all of /proc for each slot. Empty ({0}) before the pass. */
struct vgpu_process_list {
    struct vgpu_listed_process {
        uint64_t pid_namespace;
        int32_t pid; /* as the calling process sees it */
    } *processes;
    uint32_t count;
    bool listed;
};

void vgpu_process_list_free(struct vgpu_process_list *list);

/* The calling process. */
struct vgpu_identity vgpu_identity_self(void);
/* The file that the calling process has mapped at `address`. */
struct vgpu_mapped_file vgpu_mapped_file_at(const void *address);
/* True if the process may still hold memory, in these cases:
 * - it has the file mapped;
 * - it has device files of the driver open (a new program inherited them);
 * - this process may not read its entries;
 * - it is exiting, and the driver may still be freeing its memory. The kernel frees a dying process's memory, then its
 *   descriptors, then makes it a zombie.
 *
 * False also if the process cannot be found (other namespace). */
bool vgpu_process_holds(const struct vgpu_identity *process, const struct vgpu_mapped_file *file,
                        struct vgpu_process_list *list);
/* The process runs another program now and still has device files of the driver open. If the process asks about itself,
 * only inherited files count. */
bool vgpu_process_keeps(const struct vgpu_identity *process, struct vgpu_process_list *list);
/* The process has certainly ended, although its children may still hold its lock. */
bool vgpu_process_ended(const struct vgpu_identity *process, struct vgpu_process_list *list);
#endif
