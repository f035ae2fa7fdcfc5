/* Moves blocks between a card and host memory. The program's pointer stays the same.
 *
 * Moves happen at safe points: before work is handed in, and after a wait, with a minimum time between them. A move
 * needs two things: all work that the process handed in on all its cards has finished, and the gate is closed. The
 * reason: an address of the block may be anywhere, also in device memory. */
#ifndef VGPU_TIER_MOVE_H
#define VGPU_TIER_MOVE_H
#include <stdint.h>

#include "gate/gate.h"

#define VGPU_CALLS_PER_LOOK 16u

void vgpu_safe_point_slowly(void);
/* Starts the watch over borrowed room of a card, if the process holds some: see watch.h. */
void vgpu_look_after_loans(void);
/* Gives way if necessary, for a process that makes no calls. True: it still holds borrowed room. */
bool vgpu_give_way(void);
/* Makes room for memory that can only lie on the card: moves blocks of this process down until the container has room
 * for `bytes` more. Then calls `take`, which should charge them; another process may be faster. Meanwhile no block of
 * this process gets that room. False: not taken, for example because the card is busy; this call waits only a short
 * time for the card. For movable containers; call outside the gate. */
bool vgpu_with_room(unsigned card, uint64_t bytes, bool (*take)(void *), void *argument);
/* Bytes of a card for which calls of vgpu_with_room are waiting. */
uint64_t vgpu_room_wanted(unsigned card);
/* Call after a wait: the card probably has no work. */
void vgpu_safe_point_idle(void);

/* Call outside the gate, before work is handed in. */
static inline void vgpu_safe_point(void) {
    struct vgpu_passage *mine = vgpu_passage;
    if (__builtin_expect(mine != NULL && mine->until_look != 0, 1))
        mine->until_look--;
    else
        vgpu_safe_point_slowly();
}
/* In a forked child: process.h. */
void vgpu_moves_forget(void);
#endif
