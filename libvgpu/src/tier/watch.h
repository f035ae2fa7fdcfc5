/* A process that holds room of a card on loan and makes no calls has no safe points. So as long as it holds some, a
 * thread of the library's looks ten times a second whether the loan was taken back. It is there in movable mode alone,
 * from the first loan that is used until ten seconds after the last. */
#ifndef VGPU_TIER_WATCH_H
#define VGPU_TIER_WATCH_H

#include <stdbool.h>

/* There is nothing to start: it runs, or cannot. */
bool vgpu_watching_loans(void);
/* Of a process that holds more of a card than it is guaranteed. */
void vgpu_watch_loans(void);
/* In a forked child: process.h. */
void vgpu_watch_forget(void);
#endif
