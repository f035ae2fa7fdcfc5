/* Memory pools of stream-ordered allocations.
 *
 * What is charged is what a pool has RESERVED from the card, not what is allocated from it: a pool keeps freed memory,
 * nobody else can use that, and NVML and cuMemGetInfo count it as used. Reading the reserve follows every allocation
 * and every free that leaves a step of growth unused, and precedes every refusal. */
#ifndef VGPU_POOLS_H
#define VGPU_POOLS_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "ledger/ledger.h"

struct vgpu_pool;

/* The record of a pool, in `pool`; NULL there: none, or not on a card (host memory). `place` tells the card where the
 * driver does not. False: no memory. */
bool vgpu_pool_of(CUmemoryPool handle, const struct vgpu_place *place, struct vgpu_pool **pool);
/* A pool was made on a device, or in host memory (VGPU_NO_DEVICE). `special`: as of vgpu_pool_is_special. */
void vgpu_pool_made(CUmemoryPool handle, CUdevice device, bool special);
/* Before the driver is asked to destroy a pool, whose handle another one may get at once: what is known of it (NULL:
 * nothing), for vgpu_pool_went. */
struct vgpu_pool *vgpu_pool_going(CUmemoryPool handle);
/* After its answer. What is still allocated from a pool that is gone stays charged until it is freed. */
void vgpu_pool_went(struct vgpu_pool *pool, bool gone);

unsigned vgpu_pool_card(const struct vgpu_pool *pool);
/* Memory that others may be shown, or of a special kind (managed, for the decompression engine), which a block of the
 * tier cannot stand for; or of which the program has said how much there may be. */
bool vgpu_pool_is_special(const struct vgpu_pool *pool);
/* The device that a pool is on; VGPU_NO_DEVICE: host memory, or the driver does not say. */
CUdevice vgpu_pool_device(CUmemoryPool handle);
/* Before an allocation: how much the pool may take from the card for it beyond what it holds unused, at most; 0:
 * nothing. What is unused is promised to this allocation until vgpu_pool_settle. */
uint64_t vgpu_pool_growth(struct vgpu_pool *pool, uint64_t bytes);
/* The promise alone is taken back: the allocation is not tried. */
void vgpu_pool_refused(struct vgpu_pool *pool, uint64_t bytes);
/* Adds a charge already made for the growth. */
void vgpu_pool_expect(struct vgpu_pool *pool, struct vgpu_ticket ticket, uint64_t growth);
/* After an allocation of `bytes`: `expected` as charged before (0: nothing), whether the driver granted it. Makes the
 * charge equal to the reserve. False: the reserve has grown beyond the limit, the caller frees what it got. */
bool vgpu_pool_settle(struct vgpu_pool *pool, uint64_t expected, uint64_t bytes, bool granted);
/* An allocation of this size has been freed. */
void vgpu_pool_forget(struct vgpu_pool *pool, uint64_t bytes);
/* What the graphs of this process have reserved on a device, which no pool of the program holds. NULL: no memory. */
struct vgpu_pool *vgpu_pool_of_graphs(CUdevice device);
/* A graph is about to be launched: until vgpu_pool_leave, nothing of the charge is given back. Returns what is charged
 * now. */
uint64_t vgpu_pool_enter(struct vgpu_pool *pool);
/* After it; `expected`: what vgpu_pool_expect added for it. Makes the charge equal to the reserve, even above the
 * limit: the work runs already. */
void vgpu_pool_leave(struct vgpu_pool *pool, uint64_t expected);
/* The driver has given unused memory of a pool back to the card; one that was never seen here holds no charge. */
void vgpu_pool_trimmed(CUmemoryPool handle);
/* Makes the charges of all pools on a card equal to their reserves. */
void vgpu_pools_settle(unsigned card);
/* Lets all pools on a card give unused memory back to it; true if the account has sunk. */
bool vgpu_pools_give_back(unsigned card);
/* In a forked child: process.h. */
void vgpu_pools_forget(void);
#endif
