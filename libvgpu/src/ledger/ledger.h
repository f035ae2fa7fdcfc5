/* This process's side of the region: map it, take a slot, charge and release. Used by every hook family; knows no CUDA.
 */
#ifndef VGPU_LEDGER_H
#define VGPU_LEDGER_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/region.h"

/* How this process is limited; decided once by vgpu_attach, again after fork. */
enum vgpu_mode {
    VGPU_UNLIMITED, /* no region, no limits in the environment */
    VGPU_REGION,    /* limits and usage are mapped, a slot is taken when first needed */
    VGPU_PRIVATE,   /* limits from the environment, usage in private memory: they hold for this process alone */
    /* managed, but usage is missing or unusable: every call that would need it fails with out-of-memory */
    VGPU_BROKEN,
};

struct vgpu_mapping {
    const struct vgpu_limits_file *limits;
    struct vgpu_usage_file *usage;
    /* open description whose byte locks mark live slots; close-on-exec, inherited by fork; -1 when private */
    int lock_fd;
    bool managed; /* /run/vgpu/limits is present: environment variables decide nothing */
};

/* Finds the region: /run/vgpu (managed), else VGPU_DIR (made by the first process from CUDA_DEVICE_MEMORY_LIMIT[_<i>]
 * and CUDA_DEVICE_SM_LIMIT), else the environment alone. Never blocks more than 100 ms behind a dead process;
 * idempotent, thread-safe, fork-aware. */
enum vgpu_mode vgpu_attach(void);
const struct vgpu_mapping *vgpu_mapping(void);
/* One sentence for the log when vgpu_attach chose VGPU_BROKEN, or VGPU_PRIVATE although VGPU_DIR was set; "" otherwise.
 */
const char *vgpu_attach_note(void);

/* The limits in force now; cheap enough for every call. What it points to does not change for as long as a call takes;
 * ask again in the next one. NULL when unlimited or broken. */
const struct vgpu_limits *vgpu_limits_now(void);

/* Names the lane that made a charge, which must also release it: keep it beside the pointer. A ticket from before a
 * fork releases nothing in the child: the charge is the parent's. */
struct vgpu_ticket {
    uint16_t lane;   /* number of the slot's taking << 4 | lane inside the slot; 0 is never valid */
    uint8_t card;    /* index into the limits file */
    uint8_t account; /* enum vgpu_account_index, or VGPU_ON_CARD */
};

/* What a ticket says of memory on the card that cannot move, where VGPU_OVERSUBSCRIBE is set: charged to
 * VGPU_DEVICE_BYTES, VGPU_RESIDENT_BYTES and VGPU_FIXED_BYTES; or to the last two alone. */
#define VGPU_ON_CARD VGPU_ACCOUNTS
#define VGPU_FIXED_PLACE (VGPU_ACCOUNTS + 1)

/* Device bytes: of memory on the card that cannot move (VGPU_ON_CARD where VGPU_OVERSUBSCRIBE is set). Refusals are
 * counted, but not of host bytes, and not where VGPU_OVERSUBSCRIBE is set: there may be another way.
 * Charges bytes against the account's limit, reaping dead processes before refusing. False: refused (counted), nothing
 * changed; also when broken, for a card that the limits do not list, and when all slots are taken. Unlimited: true,
 * nothing is counted. */
bool vgpu_charge(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket);
/* Charges VGPU_DEVICE_BYTES alone: where the memory is going to lie is charged separately. */
bool vgpu_charge_allocated(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* Charges VGPU_RESIDENT_BYTES, of which `spare` bytes below the limit are left free: memory on the card that can move.
 */
bool vgpu_charge_resident(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket);
/* The same for memory that cannot move, beside what vgpu_charge_allocated has charged for the same bytes, whose ticket
 * then says VGPU_ON_CARD. */
bool vgpu_charge_beside(struct vgpu_ticket *allocated, uint64_t bytes, uint64_t spare);
/* Takes that back; the ticket is of VGPU_DEVICE_BYTES alone again. */
void vgpu_release_beside(struct vgpu_ticket *on_card, uint64_t bytes);
/* What vgpu_charge_resident has charged cannot move any more: from now on a part of the guarantee, even above it
 * (VGPU_FIXED_PLACE). */
void vgpu_charge_fixed(struct vgpu_ticket *resident, uint64_t bytes);
/* What the container may hold on a card: guarantee + lent. */
uint64_t vgpu_resident_limit(unsigned card);
/* A context has been made, so the driver's files are open: where another program would inherit them, the charges last
 * as long. */
void vgpu_charges_pass_on(void);
/* Charges even above the limit (memory that the driver has taken already, such as a module). */
void vgpu_charge_always(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket);
/* Gives bytes of a charge back (all or part of it); never more than the lane holds. */
void vgpu_release(struct vgpu_ticket ticket, uint64_t bytes);
/* An allocation was answered with out of memory where VGPU_OVERSUBSCRIBE is set. */
void vgpu_count_refused(unsigned card);
/* What the account says now. */
uint64_t vgpu_used(unsigned card, enum vgpu_account_index account);
/* Frees the charges of dead processes, at most every `min_interval_ms`; returns how many. */
int vgpu_reap(unsigned min_interval_ms);
/* Statistics of this process's slot; nothing happens when unlimited or broken. Buffers, the most frequent kind, are not
 * counted: they are what is charged and of no other kind. */
void vgpu_count_kind(unsigned card, enum vgpu_kind kind, int64_t bytes);
void vgpu_count_gpu_time(unsigned card, uint64_t gpu_ns, uint64_t launches);
/* Time that a launch waited for the core limit. */
void vgpu_count_throttled(unsigned card, uint64_t ns);
#endif
