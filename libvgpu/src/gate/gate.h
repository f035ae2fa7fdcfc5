/* The gate before everything that hands work to a card or reaches into device memory: copies, fills, launches, graphs,
 * operations of streams.
 *
 * Whoever moves a block closes it, so that nobody can hand anything in while the block is nowhere. A thread in such a
 * call says so in a passage of its own, by plain stores: what makes the gate safe is paid by who closes it
 * (membarrier). Who meets a closed gate waits until it opens; a call inside another one (a driver that calls the
 * program back) never waits. A forked child starts with an open gate. */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

#define VGPU_GATE_CLOSED 1u
#define VGPU_PASSAGE_OF_NOBODY 2u
#define VGPU_GATE_FENCED 2u /* the kernel has no membarrier for us: every passage has to order itself */

/* What one thread tells the others. Reused by a later thread, never freed. */
struct vgpu_passage {
    _Atomic uint32_t inside; /* calls under way; more than one: within each other */
    _Atomic uint32_t taken;  /* by a living thread, or VGPU_PASSAGE_OF_NOBODY */
    struct vgpu_passage *next;
    /* for streams.c */
    uint64_t epoch;             /* of what is known of streams; another one: nothing below is */
    uintptr_t streams[8];       /* known ones that the thread used lately, by a hash */
    _Atomic uint64_t handed_in; /* calls that used the stream which the thread has of its own */
    _Atomic uint64_t finished;  /* of them, all up to this one have been seen finished */
    _Atomic uint64_t going;     /* of them, those that go with its context */
    _Atomic(CUcontext) own;     /* context of that stream */
    bool shared;                /* some of it is a thread's that had this passage before */
    /* for tier_move.c and touched.c */
    uint32_t until_look;  /* calls until it is looked whether anything should move */
    uint32_t until_noted; /* launches until the next one whose blocks are noted */
    uint32_t noted_of;    /* one launch of so many is noted, on average */
    uint32_t random;
    uint32_t noted; /* entries of `touches` */
    uint64_t looked_ns;
    uint32_t touches[128]; /* launches: the number of blocks that they touch, and those */
} __attribute__((aligned(64)));

/* Something can move: set before the process has a context, for as long as it lives. */
extern atomic_bool vgpu_gate_armed;
extern _Atomic uint32_t vgpu_gate_state;
extern _Atomic(struct vgpu_passage *) vgpu_passages;
extern __thread __attribute__((tls_model("initial-exec"))) struct vgpu_passage *vgpu_passage;

void vgpu_gate_arm(void);
/* The calling thread's; NULL: no memory for one, then the process counts such threads. */
struct vgpu_passage *vgpu_passage_take(void);
/* A new one that no thread takes, for streams.c to count work of others in; NULL: no memory. */
struct vgpu_passage *vgpu_passage_of_nobody(void);
void vgpu_gate_wait(struct vgpu_passage *mine, uint32_t depth);
void vgpu_gate_leave_strangely(void); /* entered without a passage, or before a fork */

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

/* True: the calling thread is in such a call, or has closed the gate. It must not close it. */
bool vgpu_gate_inside(void);
/* Closes the gate, if nobody else has, and if everybody who is inside leaves within `patience_ns`; what they did is
 * visible then. False: it is open. */
bool vgpu_gate_close(uint64_t patience_ns);
void vgpu_gate_open(void);
/* In a forked child: process.h. */
void vgpu_gate_forget(void);
#endif
