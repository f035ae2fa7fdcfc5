/* One card as the arbiter sees it: its containers, what they did lately, and what they may do next. */
#ifndef VGPU_ARBITER_CARD_H
#define VGPU_ARBITER_CARD_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "arbiter/arbiter.h"
#include "vgpu/region.h"

#define VGPU_ARBITER_PERIOD_NS 10000000u

struct vgpu_container;

/* The large part of a member, kept apart from the data of every look. */
struct vgpu_arbiter_history {
    struct vgpu_meter meter;
    struct {
        uint64_t begin, end;
    } runs[VGPU_RUNS];
};

/* One container on one card. */
struct vgpu_arbiter_member {
    struct vgpu_container *container;
    unsigned index;                /* of the card in the container's limits */
    struct vgpu_arbiter_view view; /* `active`, and what was published last */
    struct {
        uint64_t used_ns; /* GPU time with refunds added back: only use changes it */
        uint64_t throttled_ns, wanted_until, tat;
    } now, before;        /* as the container wrote it */
    uint64_t run_count;   /* measured launches read so far */
    uint64_t stuck;       /* number + 1 of an entry that was being written at the last look */
    uint64_t measured_ns; /* sum of their lengths */
    uint64_t eager_until;
    uint64_t beaten;   /* last heartbeat */
    double pending_ns; /* charged, but probably still running */
    double rate;       /* part of the card's time that the container used lately */
    double refund_ns;  /* not yet published */
    bool known;        /* an earlier look has read this member */
    bool metered;      /* the meter has a first point */
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
    /* by index in the limits; NULL: the card has too many containers */
    struct vgpu_arbiter_member *members[VGPU_MAX_CARDS];
    bool broken; /* its usage file was cut short */
};

struct vgpu_arbiter_card {
    char uuid[VGPU_UUID_SIZE];
    unsigned index;                                            /* in the limits: identifies a card without UUID */
    struct vgpu_arbiter_member *members[VGPU_ARBITER_MEMBERS]; /* the seat of each container; NULL: free */
    unsigned active;
    bool lends;    /* a container uses time of another container that has no work */
    bool restless; /* the next look may find something else soon */
    uint64_t careful_until;
    uint64_t metered_until; /* until then short launches matter, because a container has long ones */
    uint32_t asked_count;
    struct vgpu_arbiter_view asked[VGPU_ARBITER_MEMBERS], answered[VGPU_ARBITER_MEMBERS];
    struct vgpu_arbiter_member seats[VGPU_ARBITER_MEMBERS];
    struct vgpu_arbiter_history histories[VGPU_ARBITER_MEMBERS];
    struct vgpu_busy busy;
};

/* Copies what containers have written, under a guard: a container that has cut its file short is ignored from then
 * on. */
void vgpu_containers_look(struct vgpu_container *first, uint64_t now);
/* True if a container has work and had none at the last look. Cheap. */
bool vgpu_containers_come(struct vgpu_container *first, uint64_t now);
/* Evaluates what the containers of a card did in the `passed` nanoseconds before `now`. Publishes into their limits
 * what they may do next. */
void vgpu_card_decide(struct vgpu_arbiter_card *card, uint64_t now, uint64_t passed);
#endif
