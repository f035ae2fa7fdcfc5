/* The calculating parts of the arbiter: the shares of a card's time, and which container's work fell into which
 * container's measurement.
 *
 * arbiter.c runs them over the open regions of a machine; vgpu/agent.h has the outside view. */
#ifndef VGPU_ARBITER_H
#define VGPU_ARBITER_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/agent.h"

/* containers per card that the arbiter tells apart; further containers run too, but get no refund */
#define VGPU_ARBITER_MEMBERS 64u

/* When each container was busy, by its measured launches: disjoint intervals in the order of time. Gaps are left
 * out. */
#define VGPU_BUSY_SPANS 4096u
struct vgpu_busy_span {
    uint64_t begin, end;
    uint64_t members; /* bit i: member i */
    uint64_t ended;   /* end of the members' measured launch that ended first; 0: unknown */
    uint64_t last_ns; /* for so long before `ended` the container of that launch had the card */
    uint32_t ender;   /* the member of that launch */
    double each;      /* part of the time that was left for each member */
};
/* What is known of the kernels of a busy container. */
struct vgpu_busy_kernel {
    uint64_t shortest_ns;    /* shortest recent measured launch: its time without waiting */
    uint64_t without_slices; /* the last launch without its waiting time; 0: not known */
    uint64_t last_end;
};
struct vgpu_busy {
    uint64_t slice_ns; /* time slice after which the card turns to another container; 0: unknown */
    struct vgpu_busy_kernel kernels[VGPU_ARBITER_MEMBERS];
    uint32_t count;
    struct vgpu_busy_span spans[VGPU_BUSY_SPANS];
};

/* GPU time that a container has used for short launches, over time: charged time minus measured time. A long launch is
 * charged before it is measured. That lifts the total for a while, and the lift counts only once. */
#define VGPU_METER_POINTS 256u
/* if a total stays lower for longer than this, the correction was final */
#define VGPU_METER_PATIENCE_NS 2000000000u
struct vgpu_meter {
    uint32_t count;   /* points noted so far */
    uint64_t lowered; /* sum of all corrections */
    uint64_t reached; /* when the total last reached its highest value */
    struct {
        uint64_t at, total;
    } points[VGPU_METER_POINTS];
};

/* Notes that `total` nanoseconds had been used at `at`. After a correction, use counts again when the total passes its
 * old value. */
void vgpu_meter_note(struct vgpu_meter *meter, uint64_t at, uint64_t total);
/* What was used in [begin, end), spread evenly between two notes. Nothing is known after the last note, nor before the
 * oldest kept note. */
uint64_t vgpu_meter_between(const struct vgpu_meter *meter, uint64_t begin, uint64_t end);

/* The meters of all members that have one. */
struct vgpu_meters {
    unsigned count;
    struct {
        unsigned member;
        const struct vgpu_meter *meter;
    } of[VGPU_ARBITER_MEMBERS];
};

/* Adds the interval in which `member` was measured as busy. Adds to refunds[] what the members were charged although
 * other members had the card.
 *
 * Only running work can end. So before its launch ended, a container had the card for a time slice, or for the length
 * of its launches. Before that the others had a slice each, and so on in turns. Short launches of others take their
 * part first.
 *
 * Intervals may come in any order. If two intervals of a member overlap, the common part counts once. Returns how much
 * of the interval is new. */
uint64_t vgpu_busy_add(struct vgpu_busy *busy, unsigned member, uint64_t begin, uint64_t end,
                       const struct vgpu_meters *meters, double refunds[VGPU_ARBITER_MEMBERS]);
/* Forgets a member, so that another container can get its number. */
void vgpu_busy_forget(struct vgpu_busy *busy, unsigned member);
#endif
