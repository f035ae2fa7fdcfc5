/* NVML's view of who uses a card: coarse and late, and the only one of neighbours where no arbiter is. */
#ifndef VGPU_CROSSCHECK_H
#define VGPU_CROSSCHECK_H
#include <stdbool.h>

/* Percent of the last second in which kernels ran: of this container's processes, and of others. False: no samples of our own processes (an idle
 * card, a MIG slice, a pid namespace that is not NVML's): nothing is known then. May take as long as an NVML query. */
bool vgpu_crosscheck(unsigned card, unsigned *ours, unsigned *others);
#endif
