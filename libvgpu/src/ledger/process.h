/* What the ledger needs from the parts above it. process.c, the only file that knows all parts, fills it in when the
 * library is linked.
 *
 * The driver does not survive a fork. Blocks, pools and measurements of the parent are not the child's. A lock that
 * another thread held at the fork would never be released. So a child forgets all of them when it first asks how it is
 * limited. */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* In a forked child: each function empties one part. Ends with NULL. */
extern void (*const vgpu_forgetters[])(void);
/* Before a refusal: each function gives back memory on a card that only the library keeps; true: there was some. Ends
 * with NULL. */
extern bool (*const vgpu_reclaimers[])(unsigned card);
extern const struct vgpu_above {
    /* reserves/capture.h */
    bool (*any_capture)(void);
    /* reserves/pools.h */
    void (*pool_forget)(void *pool, uint64_t bytes);
    /* tier/move.h */
    bool (*with_room)(unsigned card, uint64_t bytes, bool (*take)(void *argument), void *argument);
    /* hooks/context.c */
    bool (*context_seen)(CUcontext context, CUdevice device, unsigned card);
} vgpu_above;
#endif
