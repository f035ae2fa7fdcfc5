#define _GNU_SOURCE
#include "owed.h"

#include "attach.h"
#include "fork.h"
#include "ledger.h"
#include "spin.h"

static _Atomic uint64_t unknown_since[VGPU_MAX_CARDS];

static vgpu_spin lock;
static unsigned owed[VGPU_MAX_CARDS];
static atomic_uint owing; /* cards on which something is owed */

void vgpu_owed_forget(void) {
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        atomic_store(&unknown_since[card], 0);
        owed[card] = 0;
    }
    atomic_store(&owing, 0);
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

/* NULL: limits hold for this process alone, or it has no slot. */
static __typeof__(&((struct vgpu_slot *)0)->owed[0]) place(unsigned card) {
    struct vgpu_local *local = vgpu_local();
    if (!local || !vgpu_mapped.usage || !atomic_load_explicit(&local->has_slot, memory_order_acquire) || local->member.slot >= VGPU_SLOTS)
        return NULL;
    return &vgpu_mapped.usage->slots[local->member.slot].owed[card];
}

void vgpu_owed_begin(unsigned card, uint64_t now) {
    vgpu_count_gpu_time(card, 0, 0); /* takes a slot if there is none */
    __typeof__(place(card)) left = place(card);
    vgpu_spin_lock(&lock);
    if (owed[card]++ == 0) {
        atomic_fetch_add(&owing, 1);
        if (left) {
            atomic_store(&left->paid_ns, 0);
            atomic_store(&left->since_ns, now);
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
