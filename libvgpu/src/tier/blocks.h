/* The blocks of the tier: memory that the library has placed itself, on the card or in host memory behind it, under
 * addresses of its own.
 *
 * Addresses come from large ranges that are reserved for this alone, so that which block is behind an address is two
 * loads. All blocks but pinned ones (ordinary host memory of the driver, where it cannot map host memory by itself) are
 * mapped there; their addresses never change, what is behind them may.
 *
 * Who makes, frees or moves blocks holds vgpu_tier_lock. Records are never given back to the system: who has a number
 * may always read the record, and finds out under the lock, or by the gate, whether the block is still there. */
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
#define VGPU_TIER_LEAVES 8192u    /* 49 bits of address: what cards have */
#define VGPU_TIER_MOST (1u << 17) /* blocks of one process */

struct vgpu_tier_record {
    CUdeviceptr base;
    uint64_t asked;    /* bytes that the program sees; charged to VGPU_DEVICE_BYTES */
    uint64_t bytes;    /* that it takes where it lies (whole granules); 0: this record is free */
    CUcontext context; /* in which it was made, and with which it goes */
    CUdevice device;
    uint32_t card;                       /* index into the limits */
    uint32_t entry;                      /* in the card's policy; VGPU_TIER_NONE: not there, it never moves */
    CUmemGenericAllocationHandle handle; /* what is mapped at `base`; 0: pinned */
    void *memory;                        /* pinned: as cuMemHostAlloc gave it */
    struct vgpu_ticket allocated;        /* VGPU_DEVICE_BYTES, of `asked` */
    /* VGPU_RESIDENT_BYTES (also VGPU_FIXED_PLACE) or VGPU_HOST_BYTES, of `bytes` */
    struct vgpu_ticket where;
    uint64_t buffer_id; /* what CU_POINTER_ATTRIBUTE_BUFFER_ID says, wherever the block is */
    bool on_device;
    /* may move, for all that is known: made in movable mode, mapped, neither exported nor handed to others */
    bool movable;
    bool pinned;             /* cuMemHostAlloc: not in the table of addresses */
    bool shared;             /* exported, registered or mapped by others: never moves again */
    bool leaving;            /* freed in stream order: `event` has not passed yet */
    CUevent event;           /* NULL: freed while a capture was open */
    CUcontext event_context; /* of the event */
    uint64_t freed;          /* as many had been freed in this way before */
    uint64_t stream_id;      /* of the stream in whose order; 0: not known */
    /* calls under way with which its context, or its event's, may go: neither is entered, and it does not move */
    uint32_t going;
    uint32_t awaited; /* threads that wait for its context, which must not go meanwhile */
    uint32_t next;    /* free record, or of those that leave; VGPU_TIER_NONE: none */
};

/* What a card's blocks are chosen by. `lock` is held for a call of the policy, never across a call of the driver. */
struct vgpu_tier_card {
    vgpu_spin lock;
    struct vgpu_tier policy;
    uint32_t *record_of; /* by the policy's entry: the block's number */
};

extern _Atomic(_Atomic uint32_t *) vgpu_tier_leaves[VGPU_TIER_LEAVES];
extern atomic_bool vgpu_tier_used;
extern atomic_uint vgpu_tier_pinned; /* pinned blocks */

/* False: no block was ever made. */
static inline bool vgpu_tier_any(void) {
    return __builtin_expect(atomic_load_explicit(&vgpu_tier_used, memory_order_relaxed), 0);
}

/* The number of the block that is mapped at an address; VGPU_TIER_NONE: none (a pinned one, the driver's, no address at
 * all). Any 64-bit value may be asked; no lock. */
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

/* False: no block of the tier is at an address. No lock. */
static inline bool vgpu_tier_maybe(CUdeviceptr address) {
    return vgpu_tier_any() && (vgpu_tier_find(address) != VGPU_TIER_NONE ||
                               atomic_load_explicit(&vgpu_tier_pinned, memory_order_acquire) != 0);
}

/* The record of a number that vgpu_tier_find has given. */
struct vgpu_tier_record *vgpu_tier_record(uint32_t number);
/* The policy of a card; NULL: it has no blocks. */
struct vgpu_tier_card *vgpu_tier_card(unsigned card);

/* Around making, freeing and moving; held across the driver's calls. May be taken again by the thread that holds it,
 * since a driver may call the program back. vgpu_tier_try: false where another thread holds it. */
void vgpu_tier_lock(void);
bool vgpu_tier_try(void);
void vgpu_tier_unlock(void);

/* Others are about to see what is at an address: a block of the tier there never moves again. False: it lies in host
 * memory, where they cannot. */
bool vgpu_tier_show(CUdeviceptr address);
/* A block of the tier at an address never moves again, wherever it is. */
void vgpu_tier_hold(CUdeviceptr address);

/* The following under the lock. */

/* Addresses for a block of `bytes`, reserved and not mapped; 0: the driver has none. */
CUdeviceptr vgpu_tier_reserve(uint64_t bytes);
/* Gives addresses back that nothing is mapped at. */
void vgpu_tier_unreserve(CUdeviceptr base, uint64_t bytes);
/* Enters a block, whose record is copied; into its card's policy as well, if it is movable. VGPU_TIER_NONE: there are
 * too many. */
uint32_t vgpu_tier_enter(const struct vgpu_tier_record *block);
/* Takes it out of the table and of the policy; its record is free from then on. */
void vgpu_tier_leave(uint32_t number);
/* It never moves again: if it is on the card, it is a part of the guarantee from now on. */
void vgpu_tier_pin_block(uint32_t number);
/* No move of it is planned any more. */
void vgpu_tier_disregard(uint32_t number);
/* Another block has its memory and its address: it has a number of buffer of its own, and may move if the first one
 * could. */
void vgpu_tier_begin_again(uint32_t number);
/* The number of the block around any address, pinned ones included; VGPU_TIER_NONE: none. */
uint32_t vgpu_tier_around(CUdeviceptr address);
/* All blocks that were made so far have smaller numbers of buffers. No lock. */
uint64_t vgpu_tier_moment(void);
/* The first block from number `from` on; VGPU_TIER_NONE: none any more. */
uint32_t vgpu_tier_next(uint32_t from);
/* In a forked child: process.h. */
void vgpu_tier_blocks_forget(void);
#endif
