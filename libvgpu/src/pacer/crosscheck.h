/* NVML's view of the processes that use a card. It is coarse and late, but without an arbiter it is the only view of
 * neighbours. */
#ifndef VGPU_CROSSCHECK_H
#define VGPU_CROSSCHECK_H
#include <stdbool.h>

/* Percent of the last second in which kernels ran. */
struct vgpu_seen {
    unsigned ours;   /* all processes of this container */
    unsigned mine;   /* this process alone */
    unsigned others; /* processes of others */
    unsigned all;    /* any process, where NVML tells no more */
};

/* False: NVML has no samples of this container's processes. Reasons: an idle card, a MIG slice, or a pid namespace that
 * NVML does not use (drivers up to 2021 answer with the host's pids). Then `all` says how busy the card was, or is 0.
 * May take as long as two NVML queries. */
bool vgpu_crosscheck(unsigned card, struct vgpu_seen *seen);
#endif
