/* Moves of blocks between a card and host memory, under the pointer that the program has.
 *
 * At safe points: before something is handed in, and after a wait, at most every so often. A move happens only while
 * all that the process handed in has finished, on all its cards, and with the gate closed: an address of the block may
 * stand anywhere, also in device memory. */
#ifndef VGPU_TIER_MOVE_H
#define VGPU_TIER_MOVE_H
#include <stdint.h>

#include "gate/gate.h"

#define VGPU_CALLS_PER_LOOK 16u

void vgpu_safe_point_slowly(void);
/* Has the room of a card that the process holds on loan watched, if it holds some: see tier_watch.h. */
void vgpu_look_after_loans(void);
/* Gives way, if it has to, on behalf of a process that makes no calls. True: it holds some. */
bool vgpu_give_way(void);
/* Moves blocks of this process down until the container has room for `bytes` more on a card, for what can be nowhere
 * else, and calls `take`, which is to charge them and may find that another process was faster. Meanwhile no block of
 * this process gets that room. False: it was not taken, such as while the card is at work. Waits for that, but not for
 * long. Movable containers; outside the gate. */
bool vgpu_with_room(unsigned card, uint64_t bytes, bool (*take)(void *), void *argument);
/* Bytes of a card that calls of vgpu_with_room wait for. */
uint64_t vgpu_room_wanted(unsigned card);
/* After a wait: the card is likely to have nothing to do. */
void vgpu_safe_point_idle(void);

/* Outside the gate, before something is handed in. */
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
