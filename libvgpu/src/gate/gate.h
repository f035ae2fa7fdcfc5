/* The gate in front of every call that hands work to a card or reaches into device memory: copies, fills, launches,
 * graphs, operations of streams.
 *
 * The thread that moves a block closes the gate, so that no other thread can hand anything in while the block has no
 * place. A thread marks such a call in a passage of its own, by plain stores. The thread that closes the gate pays for
 * the ordering (membarrier). A thread that meets a closed gate waits until it opens. A call inside another call never
 * waits (the driver called the program back). A forked child starts with an open gate. */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

#define VGPU_GATE_CLOSED 1u
#define VGPU_PASSAGE_OF_NOBODY 2u
#define VGPU_GATE_FENCED 2u /* the kernel has no membarrier: every passage orders its own stores */

/* What one thread tells the other threads. A later thread may reuse a passage; it is never freed. */
struct vgpu_passage {
    _Atomic uint32_t inside; /* calls under way; more than one: nested calls */
    _Atomic uint32_t taken;  /* a living thread holds the passage, or VGPU_PASSAGE_OF_NOBODY */
    struct vgpu_passage *next;
    /* for streams.c */
    uint64_t epoch;             /* version of what is known of streams; if it differs, the fields below are invalid */
    uintptr_t streams[8];       /* known streams that the thread used lately, by a hash */
    _Atomic uint64_t handed_in; /* calls that used the thread's own stream (per-thread default stream) */
    _Atomic uint64_t finished;  /* how many of these calls, from the first on, have been seen finished */
    _Atomic uint64_t going;     /* how many of these calls, from the first on, end with the stream's context */
    _Atomic(CUcontext) own;     /* context of that stream */
    bool shared;                /* an earlier thread used this passage and left unfinished work in it */
    /* for tier/move.c and touched.c */
    uint32_t until_look;  /* calls until the thread checks whether a block should move */
    uint32_t until_noted; /* launches until the next launch whose blocks are noted */
    uint32_t noted_of;    /* on average, one of this many launches is noted */
    uint32_t random;
    uint32_t noted; /* entries of `touches` */
    uint64_t looked_ns;
    uint32_t touches[128]; /* for each noted launch: the number of its blocks, then the blocks */
} __attribute__((aligned(64)));

/* Blocks can move. Set before the process has a context; stays set as long as the process lives. */
extern atomic_bool vgpu_gate_armed;
extern _Atomic uint32_t vgpu_gate_state;
extern _Atomic(struct vgpu_passage *) vgpu_passages;
extern __thread __attribute__((tls_model("initial-exec"))) struct vgpu_passage *vgpu_passage;

void vgpu_gate_arm(void);
/* The calling thread's passage. NULL: no memory for a passage; then the process only counts the calls of such
 * threads. */
struct vgpu_passage *vgpu_passage_take(void);
/* A new passage without a thread, in which streams.c counts leftover work. NULL: no memory. */
struct vgpu_passage *vgpu_passage_of_nobody(void);
void vgpu_gate_wait(struct vgpu_passage *mine, uint32_t depth);
void vgpu_gate_leave_strangely(void); /* for a thread that entered without a passage, or before a fork */

static inline bool vgpu_gate_is_armed(void) {
    return __builtin_expect(atomic_load_explicit(&vgpu_gate_armed, memory_order_relaxed), 0);
}

/* Around a call, if the gate is armed. */
static inline void vgpu_gate_enter(void) {
    struct vgpu_passage *mine = vgpu_passage;
    uint32_t depth = 0;
    if (__builtin_expect(mine != NULL, 1)) {
        depth = atomic_load_explicit(&mine->inside, memory_order_relaxed);
        atomic_store_explicit(&mine->inside, depth + 1, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        if (__builtin_expect(atomic_load_explicit(&vgpu_gate_state, memory_order_acquire) == 0, 1))
            return;
    }
    vgpu_gate_wait(mine, depth);
}

static inline void vgpu_gate_leave(void) {
    struct vgpu_passage *mine = vgpu_passage;
    const uint32_t depth = mine ? atomic_load_explicit(&mine->inside, memory_order_relaxed) : 0;
    if (__builtin_expect(depth != 0, 1))
        atomic_store_explicit(&mine->inside, depth - 1, memory_order_release);
    else
        vgpu_gate_leave_strangely();
}

/* True: the calling thread is inside the gate, or has closed it. Such a thread must not close the gate. */
bool vgpu_gate_inside(void);
/* Closes the gate if no other thread has closed it and all threads inside leave within `patience_ns`. Then their stores
 * are visible. False: the gate is open. */
bool vgpu_gate_close(uint64_t patience_ns);
void vgpu_gate_open(void);
/* In a forked child: process.h. */
void vgpu_gate_forget(void);
#endif
