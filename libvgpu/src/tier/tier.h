/* The tier: memory that the container has allocated above what it may hold on the card lies in host memory, under an
 * ordinary device pointer.
 *
 * Where a new block goes:
 *   * to the card while that holds no more than guarantee + lent, less a headroom if it is a large block (2 MiB and
 * more): contexts, modules, arrays, pools and small blocks can be nowhere else;
 *   * else, also where the driver has no room, to host memory, as long as the container's budget and the machine have
 * some;
 *   * else, if it is large, into the headroom;
 *   * else it is refused as out of memory.
 * In host memory, large blocks are memory of the card's node that is mapped, where the driver can, else pinned memory.
 * On the card they are the driver's own in static mode, and mapped in movable mode. */
#ifndef VGPU_TIER_H
#define VGPU_TIER_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "tier/blocks.h"

enum vgpu_tier_mode { VGPU_TIER_OFF, VGPU_TIER_STATIC, VGPU_TIER_MOVABLE };
/* What the limits say, for as long as the region is there. */
enum vgpu_tier_mode vgpu_tier_mode(void);

/* Blocks of this size may be anywhere. */
static inline bool vgpu_tier_is_large(uint64_t bytes) {
    return bytes >= VGPU_TIER_GRANULE;
}

/* What large blocks leave free on a card for what can be nowhere else: modules, stacks, arrays, small blocks, and one
 * more context of the container, as a second process needs it when the first one has filled the card. 1/32 of the
 * guarantee, at most 256 MiB; or a context's cost (100 to 500 MiB with CUDA 12), if that is no more than 1/8 of the
 * guarantee; never more than what the limit is above the guarantee. */
uint64_t vgpu_tier_headroom(unsigned card);

/* A new block for the current context, of any size; the pointer is written when all is booked. Refusals have been told.
 * Where the tier is on. */
CUresult vgpu_tier_allocate(CUdeviceptr *pointer, uint64_t bytes);
/* In host memory, after the card was tried; `place` as for the card. Not told. Tier off: out of memory. */
CUresult vgpu_tier_on_host(CUdeviceptr *pointer, uint64_t bytes, const struct vgpu_place *place);
/* Charges memory of the card, of which `spare` stays free (VGPU_ON_CARD); gives back what the library keeps, once. */
bool vgpu_tier_charge_card(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket);

/* Makes a context current for calls of the driver that need one; false: it cannot be. */
bool vgpu_tier_enter_context(CUcontext context, bool *pushed);
void vgpu_tier_leave_context(bool pushed);

/* Charges memory that lies in host memory behind a card, in whole granules; looks whether the machine has some. */
bool vgpu_tier_charge_host(unsigned card, uint64_t bytes, struct vgpu_ticket *allocated, struct vgpu_ticket *where);
/* Where such memory is made; false: the driver cannot map host memory. */
bool vgpu_tier_host_location(CUdevice device, CUmemLocation *location);

/* False: no block of the tier begins there, the driver decides. */
bool vgpu_tier_free(CUdeviceptr pointer, CUresult *result);
/* The same in the order of a stream: the block stays until the stream has got there. */
bool vgpu_tier_free_in_order(CUdeviceptr pointer, CUstream stream, CUresult *result);
/* Ends blocks that were freed in stream order and whose streams have got there; true: there were some. Never waits. */
bool vgpu_tier_collect(void);

/* The same for those that were freed while a capture was open, too: waits for their contexts. */
void vgpu_tier_finish(void);

/* An allocation that may have to wait for what was freed in stream order before. */
struct vgpu_tier_patience {
    uint64_t ended;    /* as many had ended before it was tried */
    uint64_t freed;    /* as many were on their way when it first failed; 0: it has not yet */
    uint64_t until_ns; /* unless another one ends */
    bool over;
};
struct vgpu_tier_patience vgpu_tier_patience(void);
/* It has failed for lack of memory. True: something has ended since it was tried, for which it may have been waited
 * here; it is to be tried again. False: all that had been freed by then has ended, or does not: a stream may wait for
 * what this very thread is about to do. */
bool vgpu_tier_await(struct vgpu_tier_patience *patience);
/* A block of that many bytes that has been freed in the order of this stream, and by which it has not got yet: for its
 * next allocation it is there at once. False: there is none. */
bool vgpu_tier_take_back(CUdeviceptr *pointer, uint64_t bytes, CUstream stream, const struct vgpu_place *place);

/* Outside the gate, around the driver's call with which a context may go: meanwhile nobody enters it for a block. When
 * it is gone, its blocks that were made before the moment go, too. */
void vgpu_tier_context_going(CUcontext context);
void vgpu_tier_context_went(CUcontext context, bool gone, uint64_t moment);
/* The same of a green context, whose memory stays: it is the device's primary context's, `heir`. What leaves in the
 * order of its streams is waited for; false: in vain, and then (`finished`) it leaves when the heir has done all. */
bool vgpu_tier_green_going(CUcontext context);
void vgpu_tier_green_went(CUcontext context, bool gone, CUcontext heir, bool finished, uint64_t moment);
/* In a forked child: process.h. */
void vgpu_tier_free_forget(void);
#endif
