/* One card under the arbiter: who is on it, what they have been doing, and what they may do next. */
#ifndef VGPU_ARBITER_CARD_H
#define VGPU_ARBITER_CARD_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "arbiter/arbiter.h"
#include "vgpu/region.h"

#define VGPU_ARBITER_PERIOD_NS 10000000u

struct vgpu_container;

/* The large part of a member, apart from what every look needs. */
struct vgpu_arbiter_history {
    struct vgpu_meter meter;
    struct {
        uint64_t begin, end;
    } runs[VGPU_RUNS];
};

/* One container on one card. */
struct vgpu_arbiter_member {
    struct vgpu_container *container;
    unsigned index;                /* of the card in its limits */
    struct vgpu_arbiter_view view; /* active, and what was published last */
    struct {
        uint64_t used_ns; /* GPU time with refunds: grows with its use alone */
        uint64_t throttled_ns, wanted_until, tat;
    } now, before;        /* as written by the container */
    uint64_t run_count;   /* measured launches that have been taken in */
    uint64_t stuck;       /* number + 1 of one that was being written at the last look */
    uint64_t measured_ns; /* they were so long together */
    uint64_t eager_until;
    uint64_t beaten;   /* last heartbeat */
    double pending_ns; /* charged and not yet over, as far as time tells */
    double rate;       /* part of the card's time that it used of late */
    double refund_ns;  /* not yet published */
    bool known;        /* was looked at before */
    bool metered;      /* its meter has a point to start from */
    unsigned fresh;    /* measured launches found by this look, in history->runs */
    struct vgpu_arbiter_history *history;
};

/* One container: its two files, and a member for each of its cards. */
struct vgpu_container {
    struct vgpu_container *next;
    char *directory;
    dev_t device;
    ino_t inode;
    struct vgpu_limits_file *limits_file;
    struct vgpu_usage_file *usage;
    uint64_t selector;
    struct vgpu_limits limits;
    /* by index in its limits; NULL: the card has too many containers */
    struct vgpu_arbiter_member *members[VGPU_MAX_CARDS];
    bool broken; /* its usage file was cut short */
};

struct vgpu_arbiter_card {
    char uuid[VGPU_UUID_SIZE];
    unsigned index;                                            /* in the limits: the name of a card without UUID */
    struct vgpu_arbiter_member *members[VGPU_ARBITER_MEMBERS]; /* its seat; NULL: free */
    unsigned active;
    bool lends;    /* time of one without work is used by another */
    bool restless; /* what the last look found may be different soon */
    uint64_t careful_until;
    uint64_t metered_until; /* somebody has long launches, which others' short ones matter to */
    uint32_t asked_count;
    struct vgpu_arbiter_view asked[VGPU_ARBITER_MEMBERS], answered[VGPU_ARBITER_MEMBERS];
    struct vgpu_arbiter_member seats[VGPU_ARBITER_MEMBERS];
    struct vgpu_arbiter_history histories[VGPU_ARBITER_MEMBERS];
    struct vgpu_busy busy;
};

/* Copies what containers have written, under a guard: one that has cut its file short is left alone from then on. */
void vgpu_containers_look(struct vgpu_container *first, uint64_t now);
/* True if one has work that had none at the last look. Cheap. */
bool vgpu_containers_come(struct vgpu_container *first, uint64_t now);
/* Judges what the containers of a card have done in the `passed` nanoseconds before `now`, and publishes what they may
 * do into their limits. */
void vgpu_card_decide(struct vgpu_arbiter_card *card, uint64_t now, uint64_t passed);
#endif
