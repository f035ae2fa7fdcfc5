/* Memory pools of stream-ordered allocations.
 *
 * vgpu charges what a pool has RESERVED from the card, not what is allocated from it. The reason: a pool keeps freed
 * memory, no other process can use it, and NVML and cuMemGetInfo count it as used. vgpu reads the reserve after every
 * allocation, after every free that leaves a step of growth unused, and before every refusal. */
#ifndef VGPU_POOLS_H
#define VGPU_POOLS_H
#include <stdbool.h>
#include <stdint.h>

#include "ledger/cards.h"
#include "ledger/ledger.h"

struct vgpu_pool;

/* Finds the record of a pool, in `pool`; NULL there: no pool, or not on a card (host memory). `place` gives the card if
 * the driver does not. False: no memory. */
bool vgpu_pool_of(CUmemoryPool handle, const struct vgpu_place *place, struct vgpu_pool **pool);
/* A pool was made on a device, or in host memory (VGPU_NO_DEVICE). `special`: see vgpu_pool_is_special. */
void vgpu_pool_made(CUmemoryPool handle, CUdevice device, bool special);
/* Call before the driver destroys a pool, because another pool may get the handle at once. Returns the record (NULL:
 * none) for vgpu_pool_went. */
struct vgpu_pool *vgpu_pool_going(CUmemoryPool handle);
/* Call afterwards. What is still allocated from a destroyed pool stays charged until it is freed. */
void vgpu_pool_went(struct vgpu_pool *pool, bool gone);

unsigned vgpu_pool_card(const struct vgpu_pool *pool);
/* Memory that a block of the tier cannot replace: it can be exported, is of a special kind (managed, for the
 * decompression engine), or the program has set its maximum size. */
bool vgpu_pool_is_special(const struct vgpu_pool *pool);
/* The device of a pool; VGPU_NO_DEVICE: host memory, or the driver does not say. */
CUdevice vgpu_pool_device(CUmemoryPool handle);
/* Call before an allocation: returns how much the pool may take from the card beyond its unused memory; 0: nothing. The
 * unused memory is promised to this allocation until vgpu_pool_settle. */
uint64_t vgpu_pool_growth(struct vgpu_pool *pool, uint64_t bytes);
/* Takes only the promise back: the allocation does not happen. */
void vgpu_pool_refused(struct vgpu_pool *pool, uint64_t bytes);
/* Adds a charge that was already made for the growth. */
void vgpu_pool_expect(struct vgpu_pool *pool, struct vgpu_ticket ticket, uint64_t growth);
/* Call after an allocation of `bytes`: `expected` was charged before (0: nothing), `granted` is the driver's result.
 * Sets the charge to the reserve. False: the reserve has grown beyond the limit, so the caller frees the allocation. */
bool vgpu_pool_settle(struct vgpu_pool *pool, uint64_t expected, uint64_t bytes, bool granted);
/* An allocation of this size has been freed. */
void vgpu_pool_forget(struct vgpu_pool *pool, uint64_t bytes);
/* The memory that graphs of this process have reserved on a device; no pool of the program holds it. NULL: no
 * memory. */
struct vgpu_pool *vgpu_pool_of_graphs(CUdevice device);
/* A graph is about to be launched: until vgpu_pool_leave no part of the charge is given back. Returns the charge. */
uint64_t vgpu_pool_enter(struct vgpu_pool *pool);
/* Call afterwards; `expected`: added by vgpu_pool_expect for this launch. Sets the charge to the reserve, even beyond
 * the limit: the work runs already. */
void vgpu_pool_leave(struct vgpu_pool *pool, uint64_t expected);
/* The driver has given unused memory of a pool back to the card; a pool unknown here has no charge. */
void vgpu_pool_trimmed(CUmemoryPool handle);
/* Sets the charges of all pools on a card to their reserves. */
void vgpu_pools_settle(unsigned card);
/* Lets all pools on a card give unused memory back; true if the account has decreased. */
bool vgpu_pools_give_back(unsigned card);
/* In a forked child: process.h. */
void vgpu_pools_forget(void);
#endif
