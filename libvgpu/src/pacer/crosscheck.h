/* NVML's view of who uses a card: coarse and late, and the only one of neighbours where no arbiter is. */
#ifndef VGPU_CROSSCHECK_H
#define VGPU_CROSSCHECK_H
#include <stdbool.h>

/* Percent of the last second in which kernels ran. */
struct vgpu_seen {
    unsigned ours;   /* of this container's processes */
    unsigned mine;   /* of this one alone */
    unsigned others; /* of others' */
    unsigned all;    /* of anybody's, where that is all that can be told */
};

/* False: no samples of our own processes: an idle card, a MIG slice, or a pid namespace that is not NVML's (drivers up
 * to 2021 answer in the host's numbers). Then `all` says what the card did, or is 0. May take as long as two NVML
 * queries. */
bool vgpu_crosscheck(unsigned card, struct vgpu_seen *seen);
#endif
