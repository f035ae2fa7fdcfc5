/* What share of a card the container may use at this moment: its limits, what the arbiter publishes, and MPS. */
#ifndef VGPU_CORE_SHARE_H
#define VGPU_CORE_SHARE_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "vgpu/agent.h"

struct vgpu_pace {
    uint32_t percent; /* 0: not paced */
    /* wall time whose share idling earns at most; 0: a launch has to earn even itself before it starts */
    uint64_t burst_ns;
    bool moves; /* the arbiter may change it while a launch waits */
};

/* now: CLOCK_MONOTONIC ns. A process whose MPS client limit is in force is not paced: the card keeps it within its
 * share of multiprocessors. */
struct vgpu_pace vgpu_pace_now(const struct vgpu_limits *limits, const struct vgpu_place *place, uint64_t now);
/* True while an arbiter publishes for this card. */
bool vgpu_arbiter_lives(unsigned card, uint64_t now);
#endif
