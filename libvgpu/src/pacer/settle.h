/* Corrects payments: measured launches pay their real time, the arbiter's refunds come back, and waiting launches
 * notice both. */
#ifndef VGPU_SETTLE_H
#define VGPU_SETTLE_H
#include <stdint.h>

#include "pacer/core_share.h"
#include "pacer/samples.h"
#include "vgpu/region.h"

struct vgpu_pacer_card *vgpu_pacer_shared(unsigned card);

/* Takes a finished measurement; pass this function to vgpu_samples_collect. */
void vgpu_settle_sample(struct vgpu_sample *sample, const struct vgpu_measure *measure);
/* Counts GPU time that this process was charged (negative: got back), and the launches to which it belongs. */
void vgpu_settle_account(unsigned card, int64_t gpu_ns, uint64_t launches);
/* Charges GPU time that no sample has measured but the driver's own figures show. percent 0: only the accounting. */
void vgpu_settle_missed(unsigned card, uint32_t percent, int64_t gpu_ns);
/* Takes what the arbiter has granted since the last call, at the price of `share` (percent 0: only the accounting). */
void vgpu_settle_refunds(unsigned card, const struct vgpu_pace *share, uint64_t now);
/* Moves tat by a difference of prices; negative: launches may start earlier. */
void vgpu_settle_price(struct vgpu_pacer_card *pacer, int64_t price);

/* A start that a launch has reserved. */
struct vgpu_turn {
    uint64_t start;       /* CLOCK_MONOTONIC ns */
    uint64_t credited_ns; /* vgpu_pacer_card.credited_ns at the reservation */
    uint32_t percent;     /* share by which it was computed */
};

/* Reserves `gpu_ns` of the card's time. */
struct vgpu_turn vgpu_turn_reserve(unsigned card, uint64_t gpu_ns, const struct vgpu_pace *share, uint64_t now);
/* Waits for the reserved start. New credit or a larger share brings the start forward. */
void vgpu_turn_await(struct vgpu_turn turn, const struct vgpu_place *place);
/* In a forked child: process.h. */
void vgpu_settle_forget(void);
#endif
