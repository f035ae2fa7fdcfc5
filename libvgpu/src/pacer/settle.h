/* What becomes of payments: measured launches pay what they took, the arbiter's refunds come back, and launches that
 * wait notice both. */
#ifndef VGPU_SETTLE_H
#define VGPU_SETTLE_H
#include <stdint.h>

#include "pacer/core_share.h"
#include "pacer/samples.h"
#include "vgpu/region.h"

struct vgpu_pacer_card *vgpu_pacer_shared(unsigned card);

/* Takes a finished measurement in: to be given to vgpu_samples_collect. */
void vgpu_settle_sample(struct vgpu_sample *sample, const struct vgpu_measure *measure);
/* GPU time that this process has been charged, or given back, and the launches that it is of. */
void vgpu_settle_account(unsigned card, int64_t gpu_ns, uint64_t launches);
/* Charges what nobody has measured, and the driver's own figures show. percent 0: the accounting alone. */
void vgpu_settle_missed(unsigned card, uint32_t percent, int64_t gpu_ns);
/* Takes back what the arbiter has granted since the last time, at the price of `share` (percent 0: the accounting
 * alone). */
void vgpu_settle_refunds(unsigned card, const struct vgpu_pace *share, uint64_t now);
/* Corrects tat by a difference of prices; negative: launches may start earlier. */
void vgpu_settle_price(struct vgpu_pacer_card *pacer, int64_t price);

/* A start that a launch has reserved. */
struct vgpu_turn {
    uint64_t start;       /* CLOCK_MONOTONIC ns */
    uint64_t credited_ns; /* vgpu_pacer_card.credited_ns when it was reserved */
    uint32_t percent;     /* share that it was reckoned at */
};

/* Reserves `gpu_ns` of the card. */
struct vgpu_turn vgpu_turn_reserve(unsigned card, uint64_t gpu_ns, const struct vgpu_pace *share, uint64_t now);
/* Waits for it. Credit that comes meanwhile, or a larger share, brings it forward. */
void vgpu_turn_await(struct vgpu_turn turn, const struct vgpu_place *place);
/* In a forked child: process.h. */
void vgpu_settle_forget(void);
#endif
