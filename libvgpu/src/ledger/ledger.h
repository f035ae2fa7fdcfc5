/* This process's side of the region: maps it, takes a slot, charges and releases. Used by all hooks; knows no CUDA. */
#ifndef VGPU_LEDGER_H
#define VGPU_LEDGER_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/region.h"

/* How this process is limited; vgpu_attach decides once, and again after a fork. */
enum vgpu_mode {
    VGPU_UNLIMITED, /* no region, no limits in the environment */
    VGPU_REGION,    /* limits and usage are mapped; a slot is taken at first need */
    VGPU_PRIVATE,   /* limits from the environment, usage in private memory: the limits hold for this process alone */
    /* managed, but usage is missing or unusable: every call that needs usage fails with out of memory */
    VGPU_BROKEN,
};

struct vgpu_mapping {
    const struct vgpu_limits_file *limits;
    struct vgpu_usage_file *usage;
    /* file description whose byte locks mark live slots; close-on-exec, inherited by fork; -1: private */
    int lock_fd;
    bool managed; /* /run/vgpu/limits exists: environment variables have no effect */
};

/* Finds the region: /run/vgpu (managed), else VGPU_DIR, else the environment alone. The first process makes VGPU_DIR
 * from CUDA_DEVICE_MEMORY_LIMIT[_<i>] and CUDA_DEVICE_SM_LIMIT. Never waits more than 100 ms for a dead process;
 * idempotent, thread-safe, fork-aware. */
enum vgpu_mode vgpu_attach(void);
const struct vgpu_mapping *vgpu_mapping(void);
/* One sentence for the log if vgpu_attach chose VGPU_BROKEN, or VGPU_PRIVATE although VGPU_DIR was set; else "". */
const char *vgpu_attach_note(void);

/* The limits in force now; cheap enough for every call. The result does not change during one call; ask again in the
 * next call. NULL: unlimited or broken. */
const struct vgpu_limits *vgpu_limits_now(void);

/* Names the lane that made a charge and must also release it: keep the ticket next to the pointer. In a forked child,
 * the parent's ticket releases nothing: the charge is the parent's. */
struct vgpu_ticket {
    uint16_t lane;   /* number of the taking of the slot << 4 | lane inside the slot; 0 is never valid */
    uint8_t card;    /* index into the limits file */
    uint8_t account; /* enum vgpu_account_index, or VGPU_ON_CARD */
};

/* Ticket of memory on the card that cannot move, with VGPU_OVERSUBSCRIBE. VGPU_ON_CARD: charged to VGPU_DEVICE_BYTES,
 * VGPU_RESIDENT_BYTES and VGPU_FIXED_BYTES; VGPU_FIXED_PLACE: only to the last two. */
#define VGPU_ON_CARD VGPU_ACCOUNTS
#define VGPU_FIXED_PLACE (VGPU_ACCOUNTS + 1)

/* Charges bytes against the account's limit, and reaps dead processes before a refusal. False: refused, no change; also
 * if broken, for a card that the limits do not list, and if all slots are taken. Unlimited: true, without counting.
 *
 * VGPU_DEVICE_BYTES is for memory on the card that cannot move (with VGPU_OVERSUBSCRIBE: VGPU_ON_CARD). Refusals are
 * counted, except of host bytes, and except with VGPU_OVERSUBSCRIBE, where the caller may find another way. */
bool vgpu_charge(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket);
/* Charges only VGPU_DEVICE_BYTES: the place of the memory is charged separately. */
bool vgpu_charge_allocated(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket);
/* Charges VGPU_RESIDENT_BYTES for memory on the card that can move, and leaves `spare` bytes below the limit free. */
bool vgpu_charge_resident(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket);
/* The same for memory that cannot move, in addition to the charge of vgpu_charge_allocated for the same bytes. The
 * ticket then says VGPU_ON_CARD. */
bool vgpu_charge_beside(struct vgpu_ticket *allocated, uint64_t bytes, uint64_t spare);
/* Releases that additional charge; the ticket is of VGPU_DEVICE_BYTES alone again. */
void vgpu_release_beside(struct vgpu_ticket *on_card, uint64_t bytes);
/* Memory charged by vgpu_charge_resident cannot move any more: from now on it counts towards the guarantee, even beyond
 * it (VGPU_FIXED_PLACE). */
void vgpu_charge_fixed(struct vgpu_ticket *resident, uint64_t bytes);
/* Bytes that the container may hold on a card: guarantee + lent. */
uint64_t vgpu_resident_limit(unsigned card);
/* A context has been made, so the driver's files are open. If a new program would inherit the files (exec), the charges
 * must last as long. */
void vgpu_charges_pass_on(void);
/* Charges even beyond the limit: for memory that the driver has taken already, such as a module. */
void vgpu_charge_always(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket);
/* Releases bytes of a charge (all or a part); never more than the lane holds. */
void vgpu_release(struct vgpu_ticket ticket, uint64_t bytes);
/* Counts an allocation that was refused as out of memory, with VGPU_OVERSUBSCRIBE. */
void vgpu_count_refused(unsigned card);
/* The account's current value. */
uint64_t vgpu_used(unsigned card, enum vgpu_account_index account);
/* Frees the charges of dead processes, at most every `min_interval_ms`; returns how many. */
int vgpu_reap(unsigned min_interval_ms);
/* Statistics of this process's slot; no effect when unlimited or broken. Buffers, the most frequent kind, are not
 * counted: they are the charged bytes of no other kind. */
void vgpu_count_kind(unsigned card, enum vgpu_kind kind, int64_t bytes);
void vgpu_count_gpu_time(unsigned card, uint64_t gpu_ns, uint64_t launches);
/* Time that a launch waited for the core limit. */
void vgpu_count_throttled(unsigned card, uint64_t ns);
#endif
