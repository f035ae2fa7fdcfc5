/* The questions that every hook of an allocation asks: is this process limited, may it have these bytes, what becomes
 * of them. */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H
#include <stdbool.h>

#include "ledger/cards.h"
#include "ledger/ledger.h"
#include "ledger/local.h"
#include "ledger/sizes.h"

enum vgpu_mode vgpu_enforcement_slowly(void);

/* True: nothing limits this process or the children that it forks, and nothing will. The hooks of launches read this
 * first: it is the fastest check. */
extern atomic_bool vgpu_never_limited;

/* How the process is limited, with CUDA_DISABLE_CONTROL considered. */
static inline enum vgpu_mode vgpu_enforcement(void) {
    struct vgpu_local *local = vgpu_local();
    uint32_t known = local ? atomic_load_explicit(&local->enforced, memory_order_acquire) : 0;
    return __builtin_expect(known != 0, 1) ? (enum vgpu_mode)(known - 1) : vgpu_enforcement_slowly();
}

/* Before anything that this process keeps about blocks, pools or samples is looked at: a forked child first drops its
 * parent's. */
static inline void vgpu_own_tables(void) {
    (void)vgpu_enforcement();
}

/* Before the driver is asked to free something; then vgpu_freed. False: not known here; a NULL handle is nobody's. */
static inline bool vgpu_freeing(enum vgpu_space space, uint64_t handle, struct vgpu_freeing *freeing) {
    vgpu_own_tables();
    return handle && vgpu_sizes_any() && vgpu_sizes_free_begin(space, handle, freeing);
}

enum vgpu_verdict {
    VGPU_UNCHARGED, /* not limited: call the driver, nothing else */
    VGPU_CHARGED,   /* call the driver, then vgpu_hold or vgpu_uncharge */
    VGPU_REFUSED,   /* answer out of memory */
};

/* Charges device bytes on a card (or VGPU_CARD_UNLISTED). Memory that pools keep unused is given back before a refusal.
 */
enum vgpu_verdict vgpu_reserve(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* The same for who may still find another way: a refusal is told by vgpu_tell_refused, if it stays one. Blocks of the
 * tier give way if they can now. */
enum vgpu_verdict vgpu_reserve_quietly(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* Tells the log of an allocation that is answered with out of memory, and ends the process where the limits say so. */
void vgpu_tell_refused(unsigned card, uint64_t bytes);
/* Gives back what nothing but the library keeps on a card: blocks whose descriptors were closed, unused memory of
 * pools, blocks of the tier that were freed in stream order; true: there was some. */
bool vgpu_give_back(unsigned card);
void vgpu_uncharge(struct vgpu_ticket ticket, uint64_t bytes);
/* Books a successful allocation under its handle. False: no memory to remember it; the charge has been given back, the
 * caller frees. */
bool vgpu_hold(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding);
/* Gives back what a holding was charged. */
void vgpu_let_go(const struct vgpu_holding *holding);
/* An allocation on its way: charged before the driver is asked, booked or given back after its answer. */
struct vgpu_attempt {
    enum vgpu_verdict verdict;
    struct vgpu_place place;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};
/* Charges `bytes` where this thread would allocate; 0 bytes (odd arguments) and no context are left to the driver.
 * False: refused. */
static inline bool vgpu_attempt_here(struct vgpu_attempt *attempt, uint64_t bytes) {
    attempt->verdict = VGPU_UNCHARGED;
    attempt->bytes = bytes;
    if (bytes && vgpu_enforcement() != VGPU_UNLIMITED && vgpu_place_now(&attempt->place))
        attempt->verdict = vgpu_reserve(attempt->place.card, bytes, &attempt->ticket);
    return attempt->verdict != VGPU_REFUSED;
}
/* The same for who may still find another way: vgpu_tell_refused. */
static inline bool vgpu_attempt_quietly(struct vgpu_attempt *attempt, uint64_t bytes) {
    attempt->verdict = VGPU_UNCHARGED;
    attempt->bytes = bytes;
    if (bytes && vgpu_enforcement() != VGPU_UNLIMITED && vgpu_place_now(&attempt->place))
        attempt->verdict = vgpu_reserve_quietly(attempt->place.card, bytes, &attempt->ticket);
    return attempt->verdict != VGPU_REFUSED;
}
/* After the driver's answer: books `chosen` bytes under the handle, or gives the charge back. False: the driver
 * granted, but `chosen` is beyond the limit or cannot be remembered; the caller frees and answers out of memory. */
bool vgpu_attempt_booked(struct vgpu_attempt *attempt, CUresult result, enum vgpu_space space, uint64_t handle,
                         uint64_t chosen, enum vgpu_kind kind);
/* The end of a free that was `known`: lets go of what the handle stood for, once, however many frees of it were under
 * way. Returns `result`. */
CUresult vgpu_freed(CUresult result, enum vgpu_space space, uint64_t handle, bool known,
                    const struct vgpu_freeing *freeing);
/* The context is gone and all memory of its own with it, but for blocks of the tier. `before`: a moment before the
 * driver was asked; what came later is another context's, to which the driver has given the same handle. */
void vgpu_context_gone(CUcontext context, const struct vgpu_moment *before);
#endif
