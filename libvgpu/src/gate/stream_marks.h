/* Marks: one event per context behind all that it was given, for what threads have handed in to streams of their own;
 * nobody else can ask for those. And what streams.c has for them: its lock, and contexts to be entered. */
#ifndef VGPU_STREAM_MARKS_H
#define VGPU_STREAM_MARKS_H
#include <stdbool.h>

#include "loader/driver.h"

/* False: this thread has it already. */
bool vgpu_streams_lock(void);
void vgpu_streams_unlock(void);
bool vgpu_streams_enter(CUcontext context);
void vgpu_streams_leave(void);

/* The following under the lock. */
void vgpu_marks_forget(void);
/* With the gate closed: what threads have handed in to streams of their own in a context has finished, together with
 * all else there (CUDA 12.5). */
bool vgpu_mark_idle(CUcontext context);
/* Around the driver's call with which the context may go; lets go of the lock while another thread is in there. */
void vgpu_mark_going(CUcontext context);
void vgpu_mark_went(CUcontext context, bool gone);
#endif
