/* Records of the blocks that cuMemCreate makes, shared by the hooks that create, import, map, bind, export and release
 * such blocks. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H
#include "ledger/charge.h"

enum vgpu_block_kind {
    VGPU_BLOCK_OF_KNOWN_SIZE, /* charged from the beginning */
    /* imported, from a driver that maps whole blocks alone: charged from its first mapping on, which tells the size */
    VGPU_BLOCK_OF_UNKNOWN_SIZE,
    VGPU_BLOCK_MULTICAST, /* an object without memory of its own */
};

struct vgpu_bound;
/* What was charged later, perhaps by another lane. */
struct vgpu_supplement {
    struct vgpu_supplement *next;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};

struct vgpu_block {
    enum vgpu_block_kind kind;
    uint64_t charged;                    /* bytes, in all */
    struct vgpu_supplement *supplements; /* what of them is not on the ticket */
    struct vgpu_bound *bound;            /* what a multicast object keeps on the cards */
    struct vgpu_ticket ticket;           /* where something is charged */
    CUdevice device;
    /* it lies in host memory: VGPU_HOST_BYTES of `where`, beside VGPU_DEVICE_BYTES of `ticket` */
    bool spilled;
    struct vgpu_ticket where;
    uint32_t references; /* one per handle held, per mapping, also into arrays, per multicast object that it is bound
                          * to, per descriptor that it was exported as */
};

struct vgpu_bound {
    struct vgpu_bound *next;
    struct vgpu_block *block;
    CUdevice device;
    uint64_t offset, size;
};

/* A handle or a mapping of a block: one chain per bucket, handles and addresses in tables of their own. */
struct vgpu_link {
    struct vgpu_link *next;
    uint64_t key;   /* handle, or start address */
    uint64_t size;  /* of a mapping */
    uint32_t count; /* times this handle is held */
    struct vgpu_block *block;
};

/* Around every look at the records and the driver's call that goes with it. */
void vgpu_blocks_lock(void);
void vgpu_blocks_unlock(void);

/* The following with the lock held. */
struct vgpu_link *vgpu_block_handle(CUmemGenericAllocationHandle handle); /* NULL: not known */
struct vgpu_link *vgpu_block_around(uint64_t address);                    /* its mapping; NULL: none */
/* How many blocks lie in host memory although the program has made them on a card. */
extern atomic_uint vgpu_blocks_spilled;
/* Books a handle that the driver has given out. */
void vgpu_block_add_handle(struct vgpu_link *link);
/* Ends a block with its last reference. */
void vgpu_block_drop(struct vgpu_block *block);

/* What a use of a part of a block costs. */
struct vgpu_payment {
    struct vgpu_supplement *supplement; /* NULL: nothing was due */
};
/* Before the driver is asked for a use of a part of a block; false: it is beyond the limit. */
bool vgpu_block_pay(const struct vgpu_block *block, uint64_t offset, uint64_t size, struct vgpu_payment *payment);
/* After its answer. A use that is granted tells the size: a driver that maps parts would have told it before. */
void vgpu_block_paid(struct vgpu_block *block, const struct vgpu_payment *payment, CUresult result);
/* Gives back the charges of exported blocks that are released and whose descriptors have been closed; true: there were
 * some, of whatever card. Only the driver hears of a close, so this is asked before a refusal and by cuMemGetInfo. */
bool vgpu_blocks_give_back(void);
/* In a forked child: ledger/process.h. */
void vgpu_blocks_forget(void);
#endif
