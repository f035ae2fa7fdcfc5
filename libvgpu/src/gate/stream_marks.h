/* Marks: one event per context behind all work of that context. Marks cover the threads' own streams, which no other
 * thread can ask about. Also declares what streams.c provides for marks: its lock, and entering contexts. */
#ifndef VGPU_STREAM_MARKS_H
#define VGPU_STREAM_MARKS_H
#include <stdbool.h>

#include "loader/driver.h"

/* False: this thread already holds the lock. */
bool vgpu_streams_lock(void);
void vgpu_streams_unlock(void);
bool vgpu_streams_enter(CUcontext context);
void vgpu_streams_leave(void);

/* Call the following with the lock held. */
void vgpu_marks_forget(void);
/* Call with the gate closed. True: the work in the threads' own streams of a context has finished, with all other work
 * there (CUDA 12.5). */
bool vgpu_mark_idle(CUcontext context);
/* Around the driver's call that may destroy the context. Releases the lock while another thread records a mark
 * there. */
void vgpu_mark_going(CUcontext context);
void vgpu_mark_went(CUcontext context, bool gone);
#endif
