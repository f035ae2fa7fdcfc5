/* What the ledger needs from the parts above it. process.c, which alone knows all parts, fills it in when the library
 * is linked.
 *
 * The driver does not survive a fork: blocks, pools and measurements of the parent are not the child's, and a lock that
 * another thread held at that moment would never be released. So a child forgets them when it first asks how it is
 * limited. */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* In a forked child: empties what a part keeps. Up to a NULL. */
extern void (*const vgpu_forgetters[])(void);
/* Before a refusal: gives memory on a card back that nothing but the library keeps; true: there was some. Up to a NULL.
 */
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
