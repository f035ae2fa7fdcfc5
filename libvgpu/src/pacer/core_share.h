/* The share of a card that the container may use now, from its limits, from the arbiter, and from MPS. */
#ifndef VGPU_CORE_SHARE_H
#define VGPU_CORE_SHARE_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "vgpu/agent.h"

struct vgpu_pace {
    uint32_t percent; /* 0: not paced */
    /* most credit that an idle container earns, as wall time; 0: a launch must even earn its own time before it starts
     */
    uint64_t burst_ns;
    bool moves; /* the arbiter may change the share while a launch waits */
};

/* now: CLOCK_MONOTONIC ns. A process with an MPS client limit in force is not paced: the card keeps the process within
 * its share of multiprocessors. */
struct vgpu_pace vgpu_pace_now(const struct vgpu_limits *limits, const struct vgpu_place *place, uint64_t now);
/* True while an arbiter publishes for this card. */
bool vgpu_arbiter_lives(unsigned card, uint64_t now);
#endif
