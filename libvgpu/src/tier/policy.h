/* Which blocks belong on the card and which in host memory behind it, learned from launches alone. Pure arithmetic on
 * the caller's memory: no I/O, no allocation, no locks (the caller has one), no globals. It moves nothing itself.
 *
 * A block in host memory costs its bytes over the bus at each launch that touches it; a move costs its bytes once. So
 * the measure is touches per launch, the same for every byte of a block. A move pays if (touches saved * bytes) exceeds
 * the bytes moved.
 *
 * - Time is counted in launches. Each block has a rate: touches per launch since its birth, with less weight for older
 *   launches (window VGPU_TIER_WINDOW). Two blocks change places if the touches saved, over the shorter of the two
 *   histories, exceed the moves by 1.5 standard errors. So a block with little history must differ much, and similar
 *   blocks hardly ever change places. The error is that of a Poisson process. If touches come in bursts, the error is
 *   multiplied by the squared coefficient of variation of the gaps.
 * - If far more touches than usual go to host memory, the program has begun something new, and histories are useless.
 *   Then a block that was touched twice replaces rested blocks. Rested means: four times as long as usual, and longer
 *   than ever before. In a loop of any length, or a sweep over more than fits, no block rests longer than in the round
 *   before.
 * - A run of forty touches pays for three things: the moves of a block, the moves of the block that it replaces, and
 *   finding out. Such a run after a long rest, or a long rest after such a run, begins a new history. Shorter runs with
 *   rests between them are one history, of bursts. */
#ifndef VGPU_TIER_POLICY_H
#define VGPU_TIER_POLICY_H
#include <stdbool.h>
#include <stdint.h>

#define VGPU_TIER_NONE UINT32_MAX
/* after this many launches a touch weighs 1/e; after more launches if blocks are touched less often than every 32nd
 * launch */
#define VGPU_TIER_WINDOW 4096u
#define VGPU_TIER_LOOKED_AT 512u /* most blocks that one plan looks at */
#define VGPU_TIER_MOVES 32u      /* most moves of one plan in one direction */

/* One entry of the caller's array; only these functions write it. */
struct vgpu_tier_block {
    uint64_t bytes;           /* 0: free */
    double birth;             /* `sum` of the tier at the beginning of this history */
    uint64_t since;           /* gaps between touches are counted from this launch on */
    uint64_t last;            /* launch of the last touch, or of the beginning; in a free entry: the next free entry */
    float heat;               /* weights of the touches of this history, without the first */
    float squares;            /* sum of the squared gaps */
    uint32_t touches;         /* since `since` */
    uint32_t longest, lately; /* longest gap in launches: before the oldest gaps were last forgotten, and since then */
    /* touches since the last long rest, while they are few; launches from the first to the last of these touches */
    uint32_t run, run_length;
    bool on_device, pinned;
};

struct vgpu_tier {
    struct vgpu_tier_block *blocks;
    uint32_t capacity, used, free;       /* entries: all, those ever taken, the first free entry below `used` */
    uint32_t movable;                    /* blocks that are not pinned */
    uint32_t offset;                     /* of the last sample */
    uint64_t now;                        /* launches so far */
    uint64_t period_end;                 /* from this launch on, touches weigh more */
    double weight;                       /* of a touch now; grows over time, so that old weights need not shrink */
    double sum;                          /* of the weights of all launches */
    double hits, misses;                 /* weighted touches of movable blocks, on the device and in host memory */
    uint64_t recent_hits, recent_misses; /* 1/1024 touches, of about the last eight launches */
    double usual_gap;                    /* launches between two touches of an average block */
    double long_gap;                     /* launches without a touch that are long for all blocks */
    uint64_t look_again; /* until this launch a search with `room` and `budget` finds nothing, except in turmoil */
    int64_t room;
    uint64_t budget;
};

/* What to move at a safe point: first all of `down` to host memory, then all of `up` to the device. All moves belong
 * together: one large block that goes down may pay only because many small blocks come up, and the reverse. */
struct vgpu_tier_plan {
    uint32_t downs, ups;
    uint32_t down[VGPU_TIER_MOVES], up[VGPU_TIER_MOVES];
    uint64_t bytes; /* of all moves */
};

/* An empty tier over `capacity` entries of the caller. The entries must live as long as the tier. */
void vgpu_tier_begin(struct vgpu_tier *tier, struct vgpu_tier_block *blocks, uint32_t capacity);

/* Adds a new block of `bytes` (above 0); pinned blocks never move. Returns its index; VGPU_TIER_NONE: all entries are
 * taken. */
uint32_t vgpu_tier_add(struct vgpu_tier *tier, uint64_t bytes, bool on_device, bool pinned);

/* The block is gone; another block may get its index. */
void vgpu_tier_remove(struct vgpu_tier *tier, uint32_t index);

/* From now on the block may (not) move. */
void vgpu_tier_pin(struct vgpu_tier *tier, uint32_t index, bool pinned);

/* A block has been moved. */
void vgpu_tier_moved(struct vgpu_tier *tier, uint32_t index, bool on_device);

/* A launch touches these blocks; a block named twice counts once. Takes a few nanoseconds per block. About every 90,000
 * launches it passes over all entries once. */
void vgpu_tier_launch(struct vgpu_tier *tier, const uint32_t *touched, uint32_t count);

/* Finds the best moves of at most `budget` bytes, if the device has `room` bytes left for this tier. False: no move
 * pays. Takes some microseconds.
 *
 * With `room` below 0 the tier must give way. Then it moves the blocks that are missed least, also if that does not
 * pay, and at least one for any budget. Ask again until there is room. Then false means that no block can move.
 *
 * Looks at no more than VGPU_TIER_LOOKED_AT blocks, at different ones each time. After a search without result it does
 * not look for some launches, unless room, budget or the program have changed. */
bool vgpu_tier_plan(struct vgpu_tier *tier, int64_t room, uint64_t budget, struct vgpu_tier_plan *plan);
#endif
