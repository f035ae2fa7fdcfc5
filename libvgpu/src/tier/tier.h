/* The tier: a container may allocate more than it may hold on the card. The rest lies in host memory, behind ordinary
 * device pointers.
 *
 * Where a new block goes, in this order:
 * - to the card, while the card holds no more than guarantee + lent. A large block (2 MiB and more) also leaves a
 *   headroom free, because contexts, modules, arrays, pools and small blocks can lie only on the card;
 * - to host memory, also if the driver has no room on the card, as long as the container's budget and the machine have
 *   room;
 * - into the headroom, if the block is large;
 * - else the allocation fails with out of memory.
 *
 * In host memory, a large block is mapped memory of the card's node where the driver can map it, else pinned memory. On
 * the card, a large block is the driver's own memory in static mode, and mapped memory in movable mode. */
#ifndef VGPU_TIER_H
#define VGPU_TIER_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "tier/blocks.h"

enum vgpu_tier_mode { VGPU_TIER_OFF, VGPU_TIER_STATIC, VGPU_TIER_MOVABLE };
/* As the limits say; never changes during the life of the region. */
enum vgpu_tier_mode vgpu_tier_mode(void);

/* Blocks of this size may lie in host memory, too. */
static inline bool vgpu_tier_is_large(uint64_t bytes) {
    return bytes >= VGPU_TIER_GRANULE;
}

/* Room that large blocks leave free on a card for memory that can lie only there: modules, stacks, arrays, small
 * blocks, and one more context of the container. A second process needs that context when the first process has filled
 * the card. The headroom is 1/32 of the guarantee, at most 256 MiB. If a context costs more (100 to 500 MiB with CUDA
 * 12), but no more than 1/8 of the guarantee, the headroom is that cost. The headroom is never more than the limit
 * minus the guarantee. */
uint64_t vgpu_tier_headroom(unsigned card);

/* Makes a new block for the current context, of any size. Writes the pointer after booking the block. Logs refusals.
 * Only if the tier is on. */
CUresult vgpu_tier_allocate(CUdeviceptr *pointer, uint64_t bytes);
/* Allocates in host memory, after the card was tried; `place` as for the card. Does not log refusals. Tier off: out of
 * memory. */
CUresult vgpu_tier_on_host(CUdeviceptr *pointer, uint64_t bytes, const struct vgpu_place *place);
/* Charges memory of the card and leaves `spare` free (VGPU_ON_CARD). Before a refusal, gives back once what the library
 * keeps. */
bool vgpu_tier_charge_card(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket);

/* Makes a context current for driver calls that need it; false: not possible. */
bool vgpu_tier_enter_context(CUcontext context, bool *pushed);
void vgpu_tier_leave_context(bool pushed);

/* Charges host memory behind a card, in whole granules. Checks that the machine has it to spare. */
bool vgpu_tier_charge_host(unsigned card, uint64_t bytes, struct vgpu_ticket *allocated, struct vgpu_ticket *where);
/* Where such host memory is made; false: the driver cannot map host memory. */
bool vgpu_tier_host_location(CUdevice device, CUmemLocation *location);

/* False: no block of the tier begins at this pointer, so the driver decides. */
bool vgpu_tier_free(CUdeviceptr pointer, CUresult *result);
/* The same in stream order: the block stays until the stream has reached the free. */
bool vgpu_tier_free_in_order(CUdeviceptr pointer, CUstream stream, CUresult *result);
/* Ends blocks that were freed in stream order and whose streams have reached the free. True: there were some. Never
 * waits. */
bool vgpu_tier_collect(void);

/* Like vgpu_tier_collect, and also ends blocks that were freed while a capture was open: waits for their contexts. */
void vgpu_tier_finish(void);

/* State of an allocation that may wait for earlier frees in stream order. */
struct vgpu_tier_patience {
    uint64_t ended;    /* number of blocks that had ended before the try */
    uint64_t freed;    /* number of blocks freed by the first failure; 0: no failure yet */
    uint64_t until_ns; /* deadline; moves on when another block ends */
    bool over;
};
struct vgpu_tier_patience vgpu_tier_patience(void);
/* An allocation has failed because there is no memory. True: a block has ended since the try (this call may have waited
 * for that), so try again. False: no block has ended since the try, and no more waiting helps. Either no earlier free
 * is pending, a capture is open, or the deadline has passed: a stream may wait for what this thread does next. */
bool vgpu_tier_await(struct vgpu_tier_patience *patience);
/* Reuses a block of that many bytes that was freed in this stream's order, if the stream has not reached the free: the
 * stream's next allocation can have it at once. False: there is none. */
bool vgpu_tier_take_back(CUdeviceptr *pointer, uint64_t bytes, CUstream stream, const struct vgpu_place *place);

/* Outside the gate, around the driver's call that may destroy a context: meanwhile no thread enters the context for a
 * block. If the context was destroyed, its blocks made before the moment are freed, too. */
void vgpu_tier_context_going(CUcontext context);
void vgpu_tier_context_went(CUcontext context, bool gone, uint64_t moment);
/* The same for a green context, whose memory stays and belongs to the device's primary context, `heir`. The first call
 * waits for blocks freed in the order of the green context's streams. False: these blocks have not ended. Then
 * (`finished`) they are freed when the heir has finished all work. */
bool vgpu_tier_green_going(CUcontext context);
void vgpu_tier_green_went(CUcontext context, bool gone, CUcontext heir, bool finished, uint64_t moment);
/* In a forked child: process.h. */
void vgpu_tier_free_forget(void);
#endif
