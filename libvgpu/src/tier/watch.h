/* A process with borrowed room on a card that makes no calls has no safe points. So, as long as it holds borrowed room,
 * a thread of the library checks ten times a second whether the loan was taken back. The thread exists only in movable
 * mode: from the first used loan until ten seconds after the last. */
#ifndef VGPU_TIER_WATCH_H
#define VGPU_TIER_WATCH_H

#include <stdbool.h>

/* True: no thread needs to start; it runs already, or cannot run. */
bool vgpu_watching_loans(void);
/* Starts the watch. Call it when the process holds more of a card than its guarantee. */
void vgpu_watch_loans(void);
/* In a forked child: process.h. */
void vgpu_watch_forget(void);
#endif
