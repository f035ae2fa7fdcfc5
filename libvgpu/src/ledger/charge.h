/* The questions of every allocation hook: is this process limited, may it have these bytes, and what happens to them
 * later. */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H
#include <stdbool.h>

#include "ledger/cards.h"
#include "ledger/ledger.h"
#include "ledger/local.h"
#include "ledger/sizes.h"

enum vgpu_mode vgpu_enforcement_slowly(void);

/* True: this process and its forked children are not limited, and never will be. The launch hooks read this first,
 * because it is the fastest check. */
extern atomic_bool vgpu_never_limited;

/* How the process is limited, after CUDA_DISABLE_CONTROL. */
static inline enum vgpu_mode vgpu_enforcement(void) {
    struct vgpu_local *local = vgpu_local();
    uint32_t known = local ? atomic_load_explicit(&local->enforced, memory_order_acquire) : 0;
    return __builtin_expect(known != 0, 1) ? (enum vgpu_mode)(known - 1) : vgpu_enforcement_slowly();
}

/* Call before reading any table of blocks, pools or samples: a forked child first drops its parent's tables. */
static inline void vgpu_own_tables(void) {
    (void)vgpu_enforcement();
}

/* Call before the driver frees something; then call vgpu_freed. False: the handle is not known here, or NULL. */
static inline bool vgpu_freeing(enum vgpu_space space, uint64_t handle, struct vgpu_freeing *freeing) {
    vgpu_own_tables();
    return handle && vgpu_sizes_any() && vgpu_sizes_free_begin(space, handle, freeing);
}

enum vgpu_verdict {
    VGPU_UNCHARGED, /* not limited: call the driver, nothing else */
    VGPU_CHARGED,   /* call the driver, then vgpu_hold or vgpu_uncharge */
    VGPU_REFUSED,   /* answer out of memory */
};

/* Charges device bytes on a card (or VGPU_CARD_UNLISTED). Before a refusal, gives back memory that pools keep
 * unused. */
enum vgpu_verdict vgpu_reserve(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* The same for a caller that may find another way: if the refusal is final, the caller reports it with
 * vgpu_tell_refused. Blocks of the tier move away if they can now. */
enum vgpu_verdict vgpu_reserve_quietly(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* Logs an allocation that is refused as out of memory, and ends the process if the limits say so. */
void vgpu_tell_refused(unsigned card, uint64_t bytes);
/* Gives back memory on a card that only the library keeps: blocks whose descriptors were closed, unused memory of
 * pools, blocks of the tier that were freed in stream order. True: there was some. */
bool vgpu_give_back(unsigned card);
void vgpu_uncharge(struct vgpu_ticket ticket, uint64_t bytes);
/* Books a successful allocation under its handle. False: there is no memory to remember it; the charge has been given
 * back, and the caller frees the allocation. */
bool vgpu_hold(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding);
/* Gives back the charge of a holding. */
void vgpu_let_go(const struct vgpu_holding *holding);
/* An allocation under way: charged before the driver's call, booked or given back after it. */
struct vgpu_attempt {
    enum vgpu_verdict verdict;
    struct vgpu_place place;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};
/* Charges `bytes` where this thread would allocate. Leaves 0 bytes (odd arguments) and a missing context to the driver.
 * False: refused. */
static inline bool vgpu_attempt_here(struct vgpu_attempt *attempt, uint64_t bytes) {
    attempt->verdict = VGPU_UNCHARGED;
    attempt->bytes = bytes;
    if (bytes && vgpu_enforcement() != VGPU_UNLIMITED && vgpu_place_now(&attempt->place))
        attempt->verdict = vgpu_reserve(attempt->place.card, bytes, &attempt->ticket);
    return attempt->verdict != VGPU_REFUSED;
}
/* The same for a caller that may find another way: vgpu_tell_refused. */
static inline bool vgpu_attempt_quietly(struct vgpu_attempt *attempt, uint64_t bytes) {
    attempt->verdict = VGPU_UNCHARGED;
    attempt->bytes = bytes;
    if (bytes && vgpu_enforcement() != VGPU_UNLIMITED && vgpu_place_now(&attempt->place))
        attempt->verdict = vgpu_reserve_quietly(attempt->place.card, bytes, &attempt->ticket);
    return attempt->verdict != VGPU_REFUSED;
}
/* After the driver's call: books `chosen` bytes under the handle, or gives the charge back. False: the driver
 * succeeded, but `chosen` exceeds the limit or cannot be remembered; the caller frees the memory and answers out of
 * memory. */
bool vgpu_attempt_booked(struct vgpu_attempt *attempt, CUresult result, enum vgpu_space space, uint64_t handle,
                         uint64_t chosen, enum vgpu_kind kind);
/* The end of a free that was `known`: releases what the handle stood for, once, even if several frees of it were under
 * way. Returns `result`. */
CUresult vgpu_freed(CUresult result, enum vgpu_space space, uint64_t handle, bool known,
                    const struct vgpu_freeing *freeing);
/* The context was destroyed with all its memory, except blocks of the tier. `before`: a moment before the driver's
 * call; later entries belong to a new context with the same handle. */
void vgpu_context_gone(CUcontext context, const struct vgpu_moment *before);
#endif
