/* The crash-safe shared counter: one operation of a lane on an account, and the settling of an operation whose process
 * died.
 *
 * One operation, in the order that makes it recoverable:
 *
 *     after, intent (active) -> read word -> help -> limit test -> swap word, else read again -> bytes := after ->
 * intent (inactive)
 *
 * The word names a lane and a seq. "Help" raises `done` of that lane to that seq before the word is replaced, so that
 * the trace of an applied operation is never lost. A pending intent took effect if and only if the word still names its
 * lane and seq, or `done` has reached its seq. A reader must look at the word before `done`, because a helper writes
 * `done` before the word.
 *
 * `after` is absolute, so booking twice does no harm and no store wider than 64 bits is needed. Ordering: intents and
 * bookings have one writer at a time and are release stores, so they appear in program order. Words and `done` change
 * by sequentially consistent read-modify-writes, which publish all earlier stores. A store delayed past a later *load*
 * is harmless: the swap checks the loaded value again. tests/unit/test_ledger_model.py explores this, with store
 * buffers, in every interleaving. */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

#include "region/cas128.h"
#include "region/death.h"
#include "vgpu/region.h"

#define VGPU_LANE_NUMBER(slot, lane) ((uint32_t)((slot) * VGPU_LANES + (lane)))

#define VGPU_TAG(lane, seq) ((uint64_t)(seq) << 16 | (lane))
#define VGPU_TAG_LANE(tag) ((uint32_t)((tag) & 0xffff))
#define VGPU_TAG_SEQ(tag) ((tag) >> 16)
#define VGPU_SEQ_MASK ((UINT64_C(1) << 48) - 1)
#define VGPU_INTENT(seq, active) ((uint64_t)(seq) << 1 | (active))

static inline struct vgpu_lane *vgpu_account_lane_of(struct vgpu_usage_file *usage, unsigned card,
                                                     enum vgpu_account_index account, uint32_t lane) {
    return &usage->slots[lane / VGPU_LANES].lanes[lane % VGPU_LANES][card][account];
}

static inline uint64_t vgpu_account_load(_Atomic uint64_t *field) {
    return atomic_load_explicit(field, memory_order_acquire);
}

static inline void vgpu_account_store(_Atomic uint64_t *field, uint64_t value) {
    atomic_store_explicit(field, value, memory_order_release);
}

/* Raises `done` of the lane named in a word that `helper` is about to replace. */
static inline void vgpu_account_help(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account,
                                     uint64_t tag, uint32_t helper) {
    if (VGPU_TAG_LANE(tag) == helper)
        return; /* the helper's last operation is booked already, and `done` matters only for pending operations */
    if (VGPU_TAG_LANE(tag) >= VGPU_SLOTS * VGPU_LANES)
        return; /* a lane number this large is never valid; only a container that overwrites its own file produces it */
    _Atomic uint64_t *done = &vgpu_account_lane_of(usage, card, account, VGPU_TAG_LANE(tag))->done;
    uint64_t seen = vgpu_account_load(done);
    while (seen < VGPU_TAG_SEQ(tag) && !atomic_compare_exchange_weak(done, &seen, VGPU_TAG_SEQ(tag)))
        ;
    DEATH_POINT();
}

static inline void vgpu_account_book(struct vgpu_lane *lane, uint64_t after, uint64_t seq) {
    vgpu_account_store(&lane->bytes, after);
    DEATH_POINT();
    vgpu_account_store(&lane->intent, VGPU_INTENT(seq, 0));
    DEATH_POINT();
}

/* The account's value after the operation; false: refused. */
static inline bool vgpu_account_apply(uint64_t used, uint64_t before, uint64_t after, uint64_t limit,
                                      uint64_t *result) {
    /* a release cannot be refused; a word below the sum of its lanes was written by foreign code */
    if (after <= before) {
        *result = used >= before - after ? used - (before - after) : 0;
        return true;
    }
    uint64_t bytes = after - before;
    if (bytes > limit || used > limit || bytes > limit - used)
        return false;
    *result = used + bytes;
    return true;
}

static inline bool vgpu_account_operate(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account,
                                        uint32_t number, uint64_t after, uint64_t limit) {
    struct vgpu_lane *lane = vgpu_account_lane_of(usage, card, account, number);
    struct vgpu_word *word = &usage->accounts[card][account].word;
    const uint64_t before = atomic_load_explicit(&lane->bytes, memory_order_relaxed);
    const uint64_t seq = ((atomic_load_explicit(&lane->intent, memory_order_relaxed) >> 1) + 1) & VGPU_SEQ_MASK;

    vgpu_account_store(&lane->after, after);
    DEATH_POINT();
    vgpu_account_store(&lane->intent, VGPU_INTENT(seq, 1));
    DEATH_POINT();
    struct vgpu_word_value now, next = {.tag = VGPU_TAG(number, seq)};
    do {
        now = vgpu_word_load(word);
        if (!vgpu_account_apply(now.used, before, after, limit, &next.used)) {
            vgpu_account_store(&lane->intent, VGPU_INTENT(seq, 0));
            DEATH_POINT();
            return false;
        }
        vgpu_account_help(usage, card, account, now.tag, number);
    } while (!vgpu_word_cas(word, now, next));
    DEATH_POINT();
    vgpu_account_book(lane, after, seq);
    return true;
}

/* Adds bytes to the account and to the lane, unless the account would pass `limit` (VGPU_NO_LIMIT: no test). False: no
 * change. One writer per lane at a time: the caller holds the lane. */
static inline bool vgpu_account_charge(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account,
                                       uint32_t lane, uint64_t bytes, uint64_t limit) {
    const uint64_t held =
        atomic_load_explicit(&vgpu_account_lane_of(usage, card, account, lane)->bytes, memory_order_relaxed);
    if (bytes == 0)
        return true;
    if (held + bytes < held)
        return false;
    return vgpu_account_operate(usage, card, account, lane, held + bytes, limit);
}

/* Takes at most `bytes` from both. Returns how many bytes it took: fewer if the lane held fewer (counted in
 * usage->saturated). */
static inline uint64_t vgpu_account_release(struct vgpu_usage_file *usage, unsigned card,
                                            enum vgpu_account_index account, uint32_t lane, uint64_t bytes) {
    const uint64_t held =
        atomic_load_explicit(&vgpu_account_lane_of(usage, card, account, lane)->bytes, memory_order_relaxed);
    if (bytes > held) {
        atomic_fetch_add_explicit(&usage->saturated, 1, memory_order_relaxed);
        bytes = held;
    }
    if (bytes > 0)
        vgpu_account_operate(usage, card, account, lane, held - bytes, VGPU_NO_LIMIT);
    return bytes;
}

/* Finishes or drops the operation of a dead process in this lane, then releases all that the lane holds. The caller has
 * claimed the slot. If the caller dies in here, another process does the same again. */
void vgpu_account_settle(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account, uint32_t lane);

static inline uint64_t vgpu_account_used(const struct vgpu_usage_file *usage, unsigned card,
                                         enum vgpu_account_index account) {
    return atomic_load_explicit(&usage->accounts[card][account].word.used, memory_order_relaxed);
}
#endif
