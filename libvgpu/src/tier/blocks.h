/* The blocks of the tier: memory that the library has placed itself, on the card or in host memory behind it, at the
 * library's own addresses.
 *
 * The addresses come from large ranges that are reserved only for blocks, so that two loads find the block of an
 * address. All blocks are mapped there except pinned blocks. (A pinned block is the driver's ordinary host memory, used
 * where the driver cannot map host memory by itself.) The address of a block never changes; the memory behind it may.
 *
 * A thread that makes, frees or moves blocks holds vgpu_tier_lock. Records are never returned to the system, so a
 * thread with a number may always read the record. The thread learns under the lock, or by the gate, whether the block
 * still exists. */
#ifndef VGPU_TIER_BLOCKS_H
#define VGPU_TIER_BLOCKS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/spin.h"
#include "ledger/ledger.h"
#include "loader/driver.h"
#include "tier/policy.h"

#define VGPU_TIER_SHIFT 21u /* blocks are made of granules of 2 MiB */
#define VGPU_TIER_GRANULE (UINT64_C(1) << VGPU_TIER_SHIFT)
/* one leaf of the table names the blocks of 64 GiB of addresses */
#define VGPU_TIER_LEAF_SHIFT 36u
#define VGPU_TIER_LEAVES 8192u    /* 49 bits of address, as cards have */
#define VGPU_TIER_MOST (1u << 17) /* most blocks of one process */

struct vgpu_tier_record {
    CUdeviceptr base;
    uint64_t asked;    /* bytes that the program sees; charged to VGPU_DEVICE_BYTES */
    uint64_t bytes;    /* bytes that the block takes where it lies (whole granules); 0: this record is free */
    CUcontext context; /* the context that made the block; the block is freed with it */
    CUdevice device;
    uint32_t card; /* index into the limits */
    /* number of the block in the card's policy; VGPU_TIER_NONE: the policy lacks the block, which never moves */
    uint32_t entry;
    CUmemGenericAllocationHandle handle; /* the memory mapped at `base`; 0: pinned */
    void *memory;                        /* pinned: result of cuMemHostAlloc */
    struct vgpu_ticket allocated;        /* charge of VGPU_DEVICE_BYTES, for `asked` */
    /* charge of VGPU_RESIDENT_BYTES (also VGPU_FIXED_PLACE) or VGPU_HOST_BYTES, for `bytes` */
    struct vgpu_ticket where;
    uint64_t buffer_id; /* answer for CU_POINTER_ATTRIBUTE_BUFFER_ID, independent of the place */
    bool on_device;
    /* may move, as far as known: made in movable mode, mapped, and not visible to other processes or cards */
    bool movable;
    bool pinned;             /* cuMemHostAlloc: not in the table of addresses */
    bool shared;             /* exported, registered or mapped elsewhere: never moves again */
    bool leaving;            /* freed in stream order: `event` has not passed yet */
    CUevent event;           /* NULL: freed while a capture was open */
    CUcontext event_context; /* of the event */
    uint64_t freed;          /* number of blocks freed in stream order before this block */
    uint64_t stream_id;      /* of the stream that orders the free; 0: unknown */
    /* calls under way that may destroy the block's context or its event's context: vgpu enters neither, and the block
     * does not move */
    uint32_t going;
    uint32_t awaited; /* threads that wait for the block's context; meanwhile the context must not be destroyed */
    uint32_t next;    /* next free record, or next block in the list of leaving blocks; VGPU_TIER_NONE: none */
};

/* Chooses a card's blocks. A thread holds `lock` during a call of the policy, never across a driver call. */
struct vgpu_tier_card {
    vgpu_spin lock;
    struct vgpu_tier policy;
    uint32_t *record_of; /* by the policy's entry: number of the block */
};

extern _Atomic(_Atomic uint32_t *) vgpu_tier_leaves[VGPU_TIER_LEAVES];
extern atomic_bool vgpu_tier_used;
extern atomic_uint vgpu_tier_pinned; /* number of pinned blocks */

/* False: no block was ever made. */
static inline bool vgpu_tier_any(void) {
    return __builtin_expect(atomic_load_explicit(&vgpu_tier_used, memory_order_relaxed), 0);
}

/* The number of the block mapped at an address; VGPU_TIER_NONE: none (a pinned block, the driver's memory, no address
 * at all). Accepts any 64-bit value; takes no lock. */
static inline uint32_t vgpu_tier_find(CUdeviceptr address) {
    if (address >> VGPU_TIER_LEAF_SHIFT >= VGPU_TIER_LEAVES)
        return VGPU_TIER_NONE;
    _Atomic uint32_t *leaf =
        atomic_load_explicit(&vgpu_tier_leaves[address >> VGPU_TIER_LEAF_SHIFT], memory_order_acquire);
    if (!leaf)
        return VGPU_TIER_NONE;
    return ~atomic_load_explicit(
        &leaf[address >> VGPU_TIER_SHIFT & ((1u << (VGPU_TIER_LEAF_SHIFT - VGPU_TIER_SHIFT)) - 1)],
        memory_order_acquire);
}

/* False: no block of the tier is at this address. Takes no lock. */
static inline bool vgpu_tier_maybe(CUdeviceptr address) {
    return vgpu_tier_any() && (vgpu_tier_find(address) != VGPU_TIER_NONE ||
                               atomic_load_explicit(&vgpu_tier_pinned, memory_order_acquire) != 0);
}

/* The record of a number that vgpu_tier_find has given. */
struct vgpu_tier_record *vgpu_tier_record(uint32_t number);
/* The policy of a card; NULL: it has no blocks. */
struct vgpu_tier_card *vgpu_tier_card(unsigned card);

/* Around making, freeing and moving; held across driver calls. The holding thread may take the lock again, because the
 * driver may call the program back. vgpu_tier_try returns false if another thread holds it. */
void vgpu_tier_lock(void);
bool vgpu_tier_try(void);
void vgpu_tier_unlock(void);

/* Other cards or processes are about to see the memory at an address: a block of the tier there never moves again.
 * False: the block lies in host memory, where they cannot see it. */
bool vgpu_tier_show(CUdeviceptr address);
/* A block of the tier at this address never moves again, wherever it lies. */
void vgpu_tier_hold(CUdeviceptr address);

/* Call the following with the lock held. */

/* Reserves addresses for a block of `bytes`, without mapping; 0: the driver has none. */
CUdeviceptr vgpu_tier_reserve(uint64_t bytes);
/* Returns addresses where nothing is mapped. */
void vgpu_tier_unreserve(CUdeviceptr base, uint64_t bytes);
/* Enters a block and copies its record; a movable block also enters its card's policy. VGPU_TIER_NONE: there are too
 * many blocks. */
uint32_t vgpu_tier_enter(const struct vgpu_tier_record *block);
/* Takes a block out of the table and the policy; its record becomes free. */
void vgpu_tier_leave(uint32_t number);
/* The block never moves again. If it is on the card, it counts towards the guarantee from now on. */
void vgpu_tier_pin_block(uint32_t number);
/* Takes the block out of the policy, so that no plan moves it. */
void vgpu_tier_disregard(uint32_t number);
/* The memory and address of a block become a new block: it gets a new buffer number, and may move if the old block
 * could. */
void vgpu_tier_begin_again(uint32_t number);
/* The number of the block around any address, also of a pinned block; VGPU_TIER_NONE: none. */
uint32_t vgpu_tier_around(CUdeviceptr address);
/* All blocks made so far have smaller buffer numbers. Takes no lock. */
uint64_t vgpu_tier_moment(void);
/* The first block from number `from` on; VGPU_TIER_NONE: no more. */
uint32_t vgpu_tier_next(uint32_t from);
/* In a forked child: process.h. */
void vgpu_tier_blocks_forget(void);
#endif
