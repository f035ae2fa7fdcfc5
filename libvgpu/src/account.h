/* The crash-safe shared counter: one operation of a lane on an account, and the settling of an operation whose process died. */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/region.h"

#define VGPU_LANE_NUMBER(slot, lane) ((uint32_t)((slot) * VGPU_LANES + (lane)))

/* Adds bytes to the account and to the lane unless the account would pass `limit` (VGPU_NO_LIMIT: no test). False: nothing changed.
 * One writer per lane at a time: the caller holds it. */
bool vgpu_account_charge(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account, uint32_t lane, uint64_t bytes,
                         uint64_t limit);
/* Takes at most `bytes` from both; returns how many it took, fewer when the lane held fewer (counted in usage->saturated). */
uint64_t vgpu_account_release(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account, uint32_t lane, uint64_t bytes);
/* Finishes or drops what a dead process was doing in this lane, then releases all that the lane holds. The caller has claimed the slot. A
 * caller that dies in here is followed by another that does the same. */
void vgpu_account_settle(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account, uint32_t lane);

static inline uint64_t vgpu_account_used(const struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account)
{
    return atomic_load_explicit(&usage->accounts[card][account].word.used, memory_order_relaxed);
}
#endif
