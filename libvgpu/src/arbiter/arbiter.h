/* The parts of the arbiter that only calculate: shares of a card's time, and whose time was inside of whose
 * measurement.
 *
 * arbiter.c runs them over the open regions of a machine; vgpu/agent.h has the outside view. */
#ifndef VGPU_ARBITER_H
#define VGPU_ARBITER_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/agent.h"

/* containers of one card that are told apart; more are served, but nothing is refunded to them */
#define VGPU_ARBITER_MEMBERS 64u

/* Which containers were busy when, as far as their measured launches tell: disjoint intervals in the order of time.
 * Gaps are left out. */
#define VGPU_BUSY_SPANS 4096u
struct vgpu_busy_span {
    uint64_t begin, end;
    uint64_t members; /* bit i: member i */
    uint64_t ended;   /* end of that of their measured launches which ended first; 0: unknown */
    uint64_t last_ns; /* for so long before that its container had the card */
    uint32_t ender;   /* whose it was */
    double each;      /* part of the time that its members were left with, each */
};
/* What is known of the kernels of one that is busy. */
struct vgpu_busy_kernel {
    uint64_t shortest_ns;    /* measured launch of late: what it takes without waiting */
    uint64_t without_slices; /* the last one, as far as it did not wait; 0: not known */
    uint64_t last_end;
};
struct vgpu_busy {
    uint64_t slice_ns; /* for so long the card runs one container before it turns to another; 0: unknown */
    struct vgpu_busy_kernel kernels[VGPU_ARBITER_MEMBERS];
    uint32_t count;
    struct vgpu_busy_span spans[VGPU_BUSY_SPANS];
};

/* GPU time that a container has used for short launches, over time. It is known as what was charged less what was
 * measured, and a long launch is charged before it is measured: that lifts the total for a while, which counts once. */
#define VGPU_METER_POINTS 256u
/* a total that stays below what it was for longer was corrected for good */
#define VGPU_METER_PATIENCE_NS 2000000000u
struct vgpu_meter {
    uint32_t count;   /* points ever noted */
    uint64_t lowered; /* by corrections in all */
    uint64_t reached; /* when the total was last as high as ever */
    struct {
        uint64_t at, total;
    } points[VGPU_METER_POINTS];
};

/* Notes that `total` nanoseconds had been used at `at`; one that falls counts again when it passes what it was. */
void vgpu_meter_note(struct vgpu_meter *meter, uint64_t at, uint64_t total);
/* What was used in [begin, end), evenly spread between two notes. Nothing is known beyond the last note, and before the
 * oldest one kept. */
uint64_t vgpu_meter_between(const struct vgpu_meter *meter, uint64_t begin, uint64_t end);

/* The meters of all members that have one. */
struct vgpu_meters {
    unsigned count;
    struct {
        unsigned member;
        const struct vgpu_meter *meter;
    } of[VGPU_ARBITER_MEMBERS];
};

/* Adds the interval in which `member` was measured as busy, and to refunds[] what the members turn out to have been
 * charged although others had the card. Only what runs can end: before a launch ends, its container had the card for a
 * time slice, or for as long as its launches take; before that the others had a slice each, and so on in turns. Short
 * launches of others take their part first. Intervals may come in any order; one that overlaps another of the same
 * member counts once: returns how much of it is new. */
uint64_t vgpu_busy_add(struct vgpu_busy *busy, unsigned member, uint64_t begin, uint64_t end,
                       const struct vgpu_meters *meters, double refunds[VGPU_ARBITER_MEMBERS]);
/* Forgets a member, so that its number can be given to another. */
void vgpu_busy_forget(struct vgpu_busy *busy, unsigned member);
#endif
