/* Whether work of other processes falls into this process's measurements. An event pair contains the time slices of
 * other processes. When the card was shared, the estimates can leave such samples out. */
#ifndef VGPU_CONTENTION_H
#define VGPU_CONTENTION_H
#include <stdbool.h>
#include <stdint.h>

#include "pacer/costs.h"

/* Checks the card again if the last check is old enough. Sources: what the arbiter publishes, else NVML's utilization
 * by process, and the container's other processes. May take as long as an NVML query, four times a second. now:
 * CLOCK_MONOTONIC ns. */
void vgpu_contention_update(unsigned card, uint64_t now);
/* GPU time that NVML saw this process use but the process was not charged, if NVML has shown it long enough to be sure.
 * Each amount is returned once: the caller charges it. Only for paced processes: others launch far ahead of the running
 * work. */
uint64_t vgpu_contention_missed(unsigned card);
/* Whether the card was shared lately, with other containers or among processes of this container. */
enum vgpu_company vgpu_contention_company(unsigned card);
/* A measured time minus the part that, by NVML's figures, belonged to other processes. */
uint64_t vgpu_contention_scaled(unsigned card, uint64_t gpu_ns);
/* Records GPU time that this process has charged; the process must not count itself as a neighbour. */
void vgpu_contention_own(unsigned card, int64_t gpu_ns);
/* All GPU time that this process has charged so far. */
uint64_t vgpu_contention_spent(unsigned card);
#endif
