/* Ways to place blocks, played on a trace; each pays the bus, one unit per block and way. */
#ifndef VGPU_BENCH_WAYS_H
#define VGPU_BENCH_WAYS_H
#include "tier/policy.h"
#include "trace.h"

#define POINTS 100u /* of the bus time over the trace */

enum way { NEVER, MANAGED, HINDSIGHT, POLICY, WAYS };

struct result {
    uint64_t bus;            /* units: touches of blocks in host memory, and moves */
    uint64_t moves;          /* of these */
    uint64_t points[POINTS]; /* bus so far, at equal steps of launches */
};

/* The policy is asked after each `every`th launch, for as many plans as fit into `budget` units. */
struct rules {
    uint32_t every, budget;
};

/* NEVER moves nothing but what has to give way. MANAGED is what page faults do: a touched block comes in for the one
 * that was touched longest ago. HINDSIGHT knows, at the beginning of a phase and when a block has gone, how often the
 * rest of the phase will touch each block, and exchanges two while that saves more than both moves; room it fills with
 * what is touched more than once. POLICY is libvgpu's. */
void play(const struct trace *trace, enum way way, struct rules rules, struct result *result);
#endif
