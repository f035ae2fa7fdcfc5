/* What this process holds, by handle: how many bytes, charged by which lane, owned by which context or pool. Needed
 * because a free names only the handle. Sharded, so that threads do not meet; cost does not grow with the number of
 * blocks. */
#ifndef VGPU_SIZES_H
#define VGPU_SIZES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ledger/ledger.h"

/* Kinds of handles; their values may coincide. */
enum vgpu_space { VGPU_POINTER, VGPU_ARRAY, VGPU_MIPMAP, VGPU_CONTEXT, VGPU_EXTERNAL, VGPU_CONTEXT_LIMIT };

extern atomic_bool vgpu_sizes_used;

/* Who has paid for what a handle stands for. */
enum vgpu_payer {
    VGPU_PAID_ITSELF,   /* by its ticket */
    VGPU_PAID_BY_POOL,  /* which is its owner; the ticket is not used */
    VGPU_PAID_BY_SHARE, /* it is one of the handles of one */
};

/* Memory that several handles stand for; it is given back with the last of them. */
struct vgpu_share {
    atomic_uint handles;
    uint64_t bytes;
    struct vgpu_ticket ticket;
};

struct vgpu_holding {
    union {
        uint64_t bytes;
        struct vgpu_share *share; /* where `payer` says so */
    };
    const void *owner; /* the CUcontext with which it goes, or the pool it came from; NULL: nobody */
    struct vgpu_ticket ticket;
    uint8_t kind;  /* enum vgpu_kind */
    uint8_t payer; /* enum vgpu_payer */
    uint16_t reserved;
};

/* False: no memory for the table; nothing was added. An entry of the same handle stays beside the new one: the driver
 * has freed it, or it could not have given the handle away again, and who frees it has not yet said so. */
bool vgpu_sizes_put(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding);
/* False: nothing was ever put in. */
static inline bool vgpu_sizes_any(void) {
    return atomic_load_explicit(&vgpu_sizes_used, memory_order_relaxed);
}
/* A free on its way. Any number of them may be under way for one entry, when a program frees twice. */
struct vgpu_freeing {
    uint64_t hash;   /* of the handle */
    uint64_t newest; /* number of the entry that was put in last: what comes later is not meant */
};
/* Before the driver is asked: the entry stays where it is. False: none can be meant. */
bool vgpu_sizes_free_begin(enum vgpu_space space, uint64_t handle, struct vgpu_freeing *freeing);
/* After the driver has freed it. True: this is the first to say so, and the entry, which is in `holding`, is taken out.
 * A free that the driver has refused says nothing. */
bool vgpu_sizes_free_end(enum vgpu_space space, uint64_t handle, const struct vgpu_freeing *freeing,
                         struct vgpu_holding *holding);
/* Whether there is an entry of a handle. */
bool vgpu_sizes_has(enum vgpu_space space, uint64_t handle);
/* Takes the newest entry of a handle out; false: not known. */
bool vgpu_sizes_take(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding);
/* Makes one more handle of the share behind a handle, which stays where it is: a copy of its holding. False: not known,
 * or no share. */
bool vgpu_sizes_join(enum vgpu_space space, uint64_t handle, struct vgpu_holding *holding);
#define VGPU_SHARDS 16u
/* What had been put in by now. */
struct vgpu_moment {
    uint64_t newest[VGPU_SHARDS];
};
void vgpu_sizes_moment(struct vgpu_moment *moment);
/* Takes out every entry of this owner that was there at `until`, of whatever space, and gives it to `each`. */
void vgpu_sizes_take_owned(const void *owner, const struct vgpu_moment *until,
                           void (*each)(const struct vgpu_holding *, void *), void *argument);
/* In a forked child: process.h. */
void vgpu_sizes_forget(void);
#endif
