/* Whether somebody else's work gets into our measurements. An event pair contains the time slices of others; knowing
 * when that may happen, the estimates can do without those samples. */
#ifndef VGPU_CONTENTION_H
#define VGPU_CONTENTION_H
#include <stdbool.h>
#include <stdint.h>

#include "pacer/costs.h"

/* Looks at the card again if the last look is old enough: at what the arbiter publishes, else at NVML's utilisation by
 * process, and at the container's other processes. May take as long as an NVML query, four times a second. now:
 * CLOCK_MONOTONIC ns. */
void vgpu_contention_update(unsigned card, uint64_t now);
/* GPU time that NVML saw this process use, for longer than it takes to be sure, and that it was not charged. Answered
 * once: whoever asks charges it. For processes that are paced: others launch far ahead of what runs. */
uint64_t vgpu_contention_missed(unsigned card);
/* Whether the card was shared lately, with others or among processes of this container. */
enum vgpu_company vgpu_contention_company(unsigned card);
/* A measured time less what of it, by NVML's figures, was others'. */
uint64_t vgpu_contention_scaled(unsigned card, uint64_t gpu_ns);
/* GPU time that this process has charged; it must not take itself for a neighbour. */
void vgpu_contention_own(unsigned card, int64_t gpu_ns);
/* All of it so far. */
uint64_t vgpu_contention_spent(unsigned card);
#endif
