/* Which streams the process has, and whether all work that the process handed in has finished.
 *
 * Blocks move only when no work runs that may use them, on any stream: a copy on one card's stream may read another
 * card's memory. So the library asks the driver about all streams of the process: created streams, the default streams
 * of all used contexts, the threads' own streams, and leftovers of destroyed streams. It asks and never waits. A stream
 * that appeared in an unknown way makes the answer "not idle" forever. */
#ifndef VGPU_STREAMS_H
#define VGPU_STREAMS_H
#include <stdbool.h>

#include "gate/gate.h"

extern _Atomic uint64_t vgpu_streams_epoch;

void vgpu_stream_used_slowly(struct vgpu_passage *mine, CUstream stream, CUcontext context);

static inline unsigned vgpu_stream_place(uintptr_t key) {
    return (unsigned)((uint64_t)key * 0x9e3779b97f4a7c15ull >> 61);
}

/* Inside the gate, before the driver's call: the program hands work to a stream. The caller spells CU_STREAM_PER_THREAD
 * out; NULL is the legacy stream. */
static inline void vgpu_stream_used(CUstream stream) {
    struct vgpu_passage *mine = vgpu_passage;
    CUcontext context = NULL;
    uintptr_t key = (uintptr_t)stream;
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
        if (!DRIVER(cuCtxGetCurrent) || DRIVER(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context)
            return; /* the driver will report the error */
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

/* The same for the legacy stream of a context that may not be current. */
static inline void vgpu_default_stream_used(CUcontext context) {
    const struct vgpu_passage *mine = vgpu_passage;
    const uintptr_t key = (uintptr_t)context + 1;
    if (context && (!mine || mine->epoch != atomic_load_explicit(&vgpu_streams_epoch, memory_order_acquire) ||
                    mine->streams[vgpu_stream_place(key)] != key))
        vgpu_stream_used_slowly(vgpu_passage, CU_STREAM_LEGACY, context);
}

/* Around a call that hands work in, where the gate is armed. */
static inline void vgpu_handing_in(CUstream stream) {
    vgpu_gate_enter();
    vgpu_stream_used(stream);
}

static inline void vgpu_handed_in(void) {
    vgpu_gate_leave();
}

/* A new stream, before the program can see it. NULL: the driver is asked for its context. */
void vgpu_stream_made(CUstream stream, CUcontext context);
/* Before the driver destroys a stream: records the work that still runs in it. */
void vgpu_stream_going(CUstream stream);
/* Inside the gate, around the driver's call that may destroy a context with all its work. Another context may get the
 * same handle before the call returns. */
void vgpu_streams_context_going(CUcontext context);
void vgpu_streams_context_went(CUcontext context, bool gone);

/* All work known to have been handed to streams of a context has finished. */
bool vgpu_streams_context_idle(CUcontext context);
/* Work runs that vgpu can never ask about: no block moves from now on. */
void vgpu_streams_lost(const char *why);

/* The calling thread's own stream of a context has no work left. */
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
    } own[VGPU_WAITED_FOR]; /* the threads' own streams; the driver is asked about all other streams */
};
void vgpu_context_waiting(struct vgpu_stream_wait *wait, CUcontext context);
void vgpu_context_finished(const struct vgpu_stream_wait *wait);

/* The threads' own streams may hold too much work to ask about while the gate is closed. So this call records an event
 * behind that work, in one context. The driver may block as long as its queue is full, so a thread calls this that no
 * other thread waits for. */
void vgpu_streams_mark_late(void);
/* Before the driver begins a capture that already counts as open: waits until no thread is still recording a mark. */
void vgpu_marks_settle(void);

/* Call while the gate is closed. True: all work has finished, and no work can start. False: also while a capture is
 * open, or if anything is unknown. Takes some microseconds. */
bool vgpu_streams_idle(void);
/* In a forked child: process.h. */
void vgpu_streams_forget(void);
#endif
