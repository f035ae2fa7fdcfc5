/* Which streams the process has, and whether all that it handed in has finished.
 *
 * Blocks move only when nothing runs that may use them, wherever it was handed in: a copy on one card's stream may read
 * another card's memory. So it is asked for all streams of the process: those that were created, the default streams of
 * all contexts that were used, the ones that threads have of their own, and what is left of destroyed ones. Asked,
 * never waited for. One that came about in another way makes the answer no for good. */
#ifndef VGPU_STREAMS_H
#define VGPU_STREAMS_H
#include <stdbool.h>

#include "gate/gate.h"

extern _Atomic uint64_t vgpu_streams_epoch;

void vgpu_stream_used_slowly(struct vgpu_passage *mine, CUstream stream, CUcontext context);

static inline unsigned vgpu_stream_place(uintptr_t key) {
    return (unsigned)((uint64_t)key * 0x9e3779b97f4a7c15ull >> 61);
}

/* Inside the gate, before the driver is called: something is handed in to a stream (CU_STREAM_PER_THREAD spelled out;
 * NULL is the legacy one). */
static inline void vgpu_stream_used(CUstream stream) {
    struct vgpu_passage *mine = vgpu_passage;
    CUcontext context = NULL;
    uintptr_t key = (uintptr_t)stream;
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
        if (!DRIVER(cuCtxGetCurrent) || DRIVER(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context)
            return; /* the driver will say so */
        key = (uintptr_t)context + 1 + (stream == CU_STREAM_PER_THREAD);
    }
    if (__builtin_expect(
            !mine || mine->epoch != atomic_load_explicit(&vgpu_streams_epoch, memory_order_acquire) ||
                mine->streams[vgpu_stream_place(key)] != key ||
                (stream == CU_STREAM_PER_THREAD && atomic_load_explicit(&mine->own, memory_order_relaxed) != context),
            0)) {
        vgpu_stream_used_slowly(mine, stream, context);
        mine = vgpu_passage;
    }
    if (stream == CU_STREAM_PER_THREAD && mine)
        atomic_store_explicit(&mine->handed_in, atomic_load_explicit(&mine->handed_in, memory_order_relaxed) + 1,
                              memory_order_release);
}

/* The same for the legacy stream of a context that need not be current. */
static inline void vgpu_default_stream_used(CUcontext context) {
    const struct vgpu_passage *mine = vgpu_passage;
    const uintptr_t key = (uintptr_t)context + 1;
    if (context && (!mine || mine->epoch != atomic_load_explicit(&vgpu_streams_epoch, memory_order_acquire) ||
                    mine->streams[vgpu_stream_place(key)] != key))
        vgpu_stream_used_slowly(vgpu_passage, CU_STREAM_LEGACY, context);
}

/* Around a call that hands something in, where the gate is armed. */
static inline void vgpu_handing_in(CUstream stream) {
    vgpu_gate_enter();
    vgpu_stream_used(stream);
}

static inline void vgpu_handed_in(void) {
    vgpu_gate_leave();
}

/* A new one, before the program can see it; NULL: the driver is asked for its context. */
void vgpu_stream_made(CUstream stream, CUcontext context);
/* Before the driver destroys it: what still runs in it is kept in mind. */
void vgpu_stream_going(CUstream stream);
/* Inside the gate, around the driver's call with which a context may go, with all its work; another one may get its
 * handle before that has returned. */
void vgpu_streams_context_going(CUcontext context);
void vgpu_streams_context_went(CUcontext context, bool gone);

/* All that is known to have been handed in to streams of a context has finished. */
bool vgpu_streams_context_idle(CUcontext context);
/* Something runs that can never be asked for: nothing moves from now on. */
void vgpu_streams_lost(const char *why);

/* The calling thread's own stream of a context has nothing left to do. */
bool vgpu_own_stream_idle(CUcontext context);
/* The thread has waited for its own stream of the current context. */
void vgpu_own_stream_finished(void);
/* Around a wait for all work of a context. */
#define VGPU_WAITED_FOR 64u
struct vgpu_stream_wait {
    unsigned count;
    struct {
        struct vgpu_passage *passage;
        uint64_t handed_in;
    } own[VGPU_WAITED_FOR]; /* streams that threads have of their own; others are asked */
};
void vgpu_context_waiting(struct vgpu_stream_wait *wait, CUcontext context);
void vgpu_context_finished(const struct vgpu_stream_wait *wait);

/* Of what threads have handed in to streams of their own there may be too much to ask for it with the gate closed. Here
 * the driver is told to tell when one context has done that: this may take as long as a full queue. For a thread that
 * nobody waits for. */
void vgpu_streams_mark_late(void);
/* Before the driver begins a capture that counts as open already: it is not in the middle of that. */
void vgpu_marks_settle(void);

/* To be asked while the gate is closed. True: everything has finished, and stays so. False: also while a capture is
 * open, or if anything is unknown. Some microseconds. */
bool vgpu_streams_idle(void);
/* In a forked child: process.h. */
void vgpu_streams_forget(void);
#endif
