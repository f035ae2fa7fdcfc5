/* Records unknown work in the region, for the case that the process ends. */
#define _GNU_SOURCE
#include "pacer/owed.h"

#include "base/spin.h"
#include "ledger/attach.h"
#include "ledger/ledger.h"
#include "reserves/capture.h"

static _Atomic uint64_t unknown_since[VGPU_MAX_CARDS];

static vgpu_spin lock;
static unsigned owed[VGPU_MAX_CARDS];
static atomic_uint owing; /* number of cards with owed work */

/* By card: the last launch that paid a mean, and how to ask whether it has ended. */
static struct {
    CUcontext context;
    CUstream stream; /* CU_STREAM_PER_THREAD of another thread cannot be asked */
    const void *thread;
    bool asked; /* the stream can be asked */
} marks[VGPU_MAX_CARDS];
atomic_bool vgpu_owed_marked;
static __thread __attribute__((tls_model("initial-exec"))) char this_thread;

void vgpu_owed_forget(void) {
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        atomic_store(&unknown_since[card], 0);
        owed[card] = 0;
    }
    atomic_store(&owing, 0);
    atomic_store(&vgpu_owed_marked, false);
    atomic_store(&lock, 0);
}

bool vgpu_unknown_begin(unsigned card, uint64_t now) {
    uint64_t none = 0;
    return atomic_compare_exchange_strong(&unknown_since[card], &none, now);
}

void vgpu_unknown_end(unsigned card) {
    atomic_store(&unknown_since[card], 0);
}

uint64_t vgpu_unknown_age(unsigned card, uint64_t now) {
    const uint64_t since = atomic_load_explicit(&unknown_since[card], memory_order_relaxed);
    return since && now > since ? now - since : 0;
}

/* NULL: the limits hold for this process alone, or the process has no slot. */
static __typeof__(&((struct vgpu_slot *)0)->owed[0]) place(unsigned card) {
    struct vgpu_local *local = vgpu_local();
    if (!local || !vgpu_mapped.usage || !atomic_load_explicit(&local->has_slot, memory_order_acquire) ||
        local->member.slot >= VGPU_SLOTS)
        return NULL;
    return &vgpu_mapped.usage->slots[local->member.slot].owed[card];
}

void vgpu_owed_begin(unsigned card, uint64_t now) {
    vgpu_count_gpu_time(card, 0, 0); /* takes a slot if the process has none */
    __typeof__(place(card)) left = place(card);
    vgpu_spin_lock(&lock);
    if (owed[card]++ == 0) {
        atomic_fetch_add(&owing, 1);
        if (left) {
            atomic_store(&left->paid_ns, 0);
            atomic_store(&left->since_ns, now & ~(uint64_t)1);
        }
    }
    vgpu_spin_unlock(&lock);
}

void vgpu_owed_end(unsigned card) {
    __typeof__(place(card)) left = place(card);
    vgpu_spin_lock(&lock);
    if (owed[card] && --owed[card] == 0) {
        atomic_fetch_sub(&owing, 1);
        if (left)
            atomic_store(&left->since_ns, 0);
    }
    vgpu_spin_unlock(&lock);
}

void vgpu_owed_paid(unsigned card, int64_t gpu_ns) {
    if (!atomic_load_explicit(&owing, memory_order_relaxed))
        return;
    __typeof__(place(card)) left = place(card);
    if (left)
        atomic_fetch_add(&left->paid_ns, (uint64_t)gpu_ns);
}

void vgpu_owed_mark(const struct vgpu_place *at, CUstream stream, uint64_t now) {
    __typeof__(place(0)) left = place(at->card);
    if (!left || !vgpu_spin_try(&lock))
        return;
    if (!owed[at->card]) {
        marks[at->card].context = at->context;
        marks[at->card].stream = stream;
        marks[at->card].thread = &this_thread;
        marks[at->card].asked = true;
        atomic_store_explicit(&left->paid_ns, 0, memory_order_relaxed);
        atomic_store_explicit(&left->since_ns, now | VGPU_OWED_SETTLED, memory_order_relaxed);
        atomic_store_explicit(&vgpu_owed_marked, true, memory_order_relaxed);
    }
    vgpu_spin_unlock(&lock);
}

/* With the lock held. */
static bool idle(unsigned card) {
    CUcontext current = NULL;
    const CUstream stream = marks[card].stream;
    if (!marks[card].asked || (stream == CU_STREAM_PER_THREAD && marks[card].thread != &this_thread) ||
        !DRIVER(cuStreamQuery) || !DRIVER(cuCtxGetCurrent) || DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS ||
        current != marks[card].context)
        return false;
    return DRIVER(cuStreamQuery)(stream) == CUDA_SUCCESS;
}

void vgpu_owed_ask(void) {
    if (vgpu_any_capture() || !vgpu_spin_try(&lock))
        return;
    bool marked = false;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        __typeof__(place(0)) left = place(card);
        uint64_t since = left ? atomic_load_explicit(&left->since_ns, memory_order_relaxed) : 0;
        if (!(since & VGPU_OWED_SETTLED))
            continue;
        if (idle(card))
            atomic_store_explicit(&left->since_ns, 0, memory_order_relaxed);
        else
            marked = true;
    }
    atomic_store_explicit(&vgpu_owed_marked, marked, memory_order_relaxed);
    vgpu_spin_unlock(&lock);
}

void vgpu_owed_stream_going(CUstream stream) {
    vgpu_owed_look();
    vgpu_spin_lock(&lock);
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        marks[card].asked &=
            marks[card].stream != stream || (stream == CU_STREAM_PER_THREAD && marks[card].thread != &this_thread);
    vgpu_spin_unlock(&lock);
}
