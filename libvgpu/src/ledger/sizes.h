/* What this process holds, by handle: bytes, charging lane, and owning context or pool. Needed because a free names
 * only the handle. Sharded, so that threads rarely meet; the cost does not grow with the number of blocks. */
#ifndef VGPU_SIZES_H
#define VGPU_SIZES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ledger/ledger.h"

/* Kinds of handles; handles of different kinds may be equal. */
enum vgpu_space { VGPU_POINTER, VGPU_ARRAY, VGPU_MIPMAP, VGPU_CONTEXT, VGPU_EXTERNAL, VGPU_CONTEXT_LIMIT };

extern atomic_bool vgpu_sizes_used;

/* Who has paid for the memory behind a handle. */
enum vgpu_payer {
    VGPU_PAID_ITSELF,   /* the handle itself, by its ticket */
    VGPU_PAID_BY_POOL,  /* the pool that owns it; the ticket is not used */
    VGPU_PAID_BY_SHARE, /* a share, of which it is one handle */
};

/* Memory behind several handles; the last handle releases it. */
struct vgpu_share {
    atomic_uint handles;
    uint64_t bytes;
    struct vgpu_ticket ticket;
};

struct vgpu_holding {
    union {
        uint64_t bytes;
        struct vgpu_share *share; /* if `payer` says so */
    };
    const void *owner; /* the CUcontext with which the handle goes, or its pool; NULL: none */
    struct vgpu_ticket ticket;
    uint8_t kind;  /* enum vgpu_kind */
    uint8_t payer; /* enum vgpu_payer */
    uint16_t reserved;
};

/* Adds an entry. False: no memory for the table; no change. An old entry of the same handle stays next to the new one:
 * the driver has freed it, but the freeing thread has not reported that yet. */
bool vgpu_sizes_put(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding);
/* False: the table has never had an entry. */
static inline bool vgpu_sizes_any(void) {
    return atomic_load_explicit(&vgpu_sizes_used, memory_order_relaxed);
}
/* A free under way. A program that frees twice may have several for one entry. */
struct vgpu_freeing {
    uint64_t hash;   /* of the handle */
    uint64_t newest; /* number of the newest entry: later entries are not meant */
};
/* Call before the driver's free: the entry stays. False: no entry can be meant. */
bool vgpu_sizes_free_begin(enum vgpu_space space, uint64_t handle, struct vgpu_freeing *freeing);
/* Call after the driver has freed the handle. True: this is the first report; the entry is taken out into `holding`. Do
 * not call it for a free that the driver has refused. */
bool vgpu_sizes_free_end(enum vgpu_space space, uint64_t handle, const struct vgpu_freeing *freeing,
                         struct vgpu_holding *holding);
/* Whether there is an entry of a handle. */
bool vgpu_sizes_has(enum vgpu_space space, uint64_t handle);
/* Takes the newest entry of a handle out; false: unknown handle. */
bool vgpu_sizes_take(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding);
/* Adds one more handle to the share behind a handle, and returns a copy of its holding. The first handle stays. False:
 * unknown handle, or no share. */
bool vgpu_sizes_join(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding);
#define VGPU_SHARDS 16u
/* The entries that exist at one moment. */
struct vgpu_moment {
    uint64_t newest[VGPU_SHARDS];
};
void vgpu_sizes_moment(struct vgpu_moment *moment);
/* Takes out every entry of this owner that existed at `until`, in all spaces, and gives it to `each`. */
void vgpu_sizes_take_owned(const void *owner, const struct vgpu_moment *until,
                           void (*each)(const struct vgpu_holding *, void *), void *argument);
/* In a forked child: process.h. */
void vgpu_sizes_forget(void);
#endif
