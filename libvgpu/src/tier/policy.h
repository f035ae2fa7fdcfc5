/* Which blocks belong on the card and which in host memory behind it: learned from launches alone. Pure arithmetic on
 * the caller's memory: no I/O, no allocation, no locks (the caller has one), no globals; it moves nothing itself.
 *
 * A block in host memory costs its bytes over the bus at each launch that touches it; a move costs its bytes once. So
 * what counts is touches per launch, the same for every byte of a block, and a move is worth it when (touches saved *
 * bytes) is above the bytes moved.
 *
 *   * Time is launches. Each block has a rate, touches per launch since its birth, older launches weighing less (window
 * VGPU_TIER_WINDOW). Blocks are exchanged when, over the shorter of the histories involved, the touches saved are above
 * the moves by 1.5 standard errors: who has little history has to differ much, and blocks that are used alike hardly
 * ever change places. The error is that of a Poisson process, times the squared coefficient of variation of the gaps
 * where touches come in bursts.
 *   * While far more touches go to host memory than is usual, the program has begun something new. Then histories are
 * of no use, and a block that was touched twice takes the place of blocks that have rested four times as long as usual
 * and longer than ever before: in a loop, however long, and in a sweep over more than fits nobody rests for longer than
 * in the round before.
 *   * A run of forty touches pays for the moves of a block and of the one that it replaces, and for finding out. Such a
 * run after a long rest, or a long rest after such a run, begins a new history; shorter ones with rests between them
 * are one history, of bursts. */
#ifndef VGPU_TIER_POLICY_H
#define VGPU_TIER_POLICY_H
#include <stdbool.h>
#include <stdint.h>

#define VGPU_TIER_NONE UINT32_MAX
/* launches after which a touch weighs 1/e; more where blocks are touched more seldom than every 32nd launch */
#define VGPU_TIER_WINDOW 4096u
#define VGPU_TIER_LOOKED_AT 512u /* blocks per plan, at most */
#define VGPU_TIER_MOVES 32u      /* of one plan and direction, at most */

/* One entry of the caller's array; written by these functions alone. */
struct vgpu_tier_block {
    uint64_t bytes;           /* 0: free */
    double birth;             /* the tier's sum of weights when this history began */
    uint64_t since;           /* launch from which gaps between touches are counted */
    uint64_t last;            /* launch of the last touch, or of the beginning; of a free entry: the next free one */
    float heat;               /* weights of the touches of this history, but the first */
    float squares;            /* of the gaps, summed up */
    uint32_t touches;         /* since `since` */
    uint32_t longest, lately; /* gap: before, and since the oldest ones were last forgotten; in launches */
    /* touches since the last long rest, while they are few; launches from the first to the last of them */
    uint32_t run, run_length;
    bool on_device, pinned;
};

struct vgpu_tier {
    struct vgpu_tier_block *blocks;
    uint32_t capacity, used, free; /* entries: all, those ever taken, the first free one below `used` */
    uint32_t movable;              /* blocks that are not pinned */
    uint32_t offset;               /* of the last sample */
    uint64_t now;                  /* launches so far */
    uint64_t period_end;           /* launch from which the weight is another one */
    double weight;                 /* of a touch now; grows, so that nothing else has to shrink */
    double sum;                    /* of the weights of all launches */
    double hits, misses; /* touches of blocks on the device and in host memory, weighted; of those that can move */
    uint64_t recent_hits, recent_misses; /* 1/1024 touches, of about the last eight launches */
    double usual_gap;                    /* launches between two touches of an average block */
    double long_gap;                     /* launches without a touch that are long for all blocks */
    uint64_t look_again; /* launch before which there is nothing to find with `room` and `budget`, but in turmoil */
    int64_t room;
    uint64_t budget;
};

/* What to move at a safe point: first all of `down` to host memory, then all of `up` to the device. All or nothing: one
 * large block that goes down may pay only by the many small ones that come up for it, and the reverse. */
struct vgpu_tier_plan {
    uint32_t downs, ups;
    uint32_t down[VGPU_TIER_MOVES], up[VGPU_TIER_MOVES];
    uint64_t bytes; /* of all moves */
};

/* An empty tier over `capacity` entries of the caller's, which live as long as it. */
void vgpu_tier_begin(struct vgpu_tier *tier, struct vgpu_tier_block *blocks, uint32_t capacity);

/* A block of `bytes` (above 0) that exists from now on; pinned ones never move. Returns its index, VGPU_TIER_NONE when
 * all entries are taken. */
uint32_t vgpu_tier_add(struct vgpu_tier *tier, uint64_t bytes, bool on_device, bool pinned);

/* The block is gone; its index may be given to another one. */
void vgpu_tier_remove(struct vgpu_tier *tier, uint32_t index);

/* From now on it may, or may not, move. */
void vgpu_tier_pin(struct vgpu_tier *tier, uint32_t index, bool pinned);

/* A move that was done. */
void vgpu_tier_moved(struct vgpu_tier *tier, uint32_t index, bool on_device);

/* A launch that touches these blocks; one that is named twice counts once. A few nanoseconds per block; every 90,000
 * launches or so all entries are passed over once. */
void vgpu_tier_launch(struct vgpu_tier *tier, const uint32_t *touched, uint32_t count);

/* The best moves of at most `budget` bytes where the device has `room` bytes left for this tier; false: none is worth
 * it. With `room` below 0 the tier has to give way: the blocks that are missed least, also when that does not pay, at
 * least one whatever the budget; ask again until there is room. Then false: none can move. Looks at no more than
 * VGPU_TIER_LOOKED_AT blocks, at others each time, and not at all within some launches of a look that found nothing,
 * unless room, budget or the program have changed. Some microseconds. */
bool vgpu_tier_plan(struct vgpu_tier *tier, int64_t room, uint64_t budget, struct vgpu_tier_plan *plan);
#endif
