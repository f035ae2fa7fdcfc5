/* Records of the blocks that cuMemCreate makes. The hooks that create, import, map, bind, export and release such
 * blocks share them. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H
#include "ledger/charge.h"

enum vgpu_block_kind {
    VGPU_BLOCK_OF_KNOWN_SIZE, /* charged from the beginning */
    /* imported, from a driver that maps only whole blocks: charged at its first mapping, which tells the size */
    VGPU_BLOCK_OF_UNKNOWN_SIZE,
    VGPU_BLOCK_MULTICAST, /* an object without memory of its own */
};

struct vgpu_bound;
/* A later charge, perhaps in another lane. */
struct vgpu_supplement {
    struct vgpu_supplement *next;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};

struct vgpu_block {
    enum vgpu_block_kind kind;
    uint64_t charged;                    /* total bytes */
    struct vgpu_supplement *supplements; /* the charges that are not on the ticket */
    struct vgpu_bound *bound;            /* what a multicast object keeps on the cards */
    struct vgpu_ticket ticket;           /* valid if something is charged */
    CUdevice device;
    /* the block lies in host memory: VGPU_HOST_BYTES of `where`, in addition to VGPU_DEVICE_BYTES of `ticket` */
    bool spilled;
    struct vgpu_ticket where;
    /* one per held handle, per mapping (also into arrays), per multicast object to which the block is bound, and per
     * exported descriptor */
    uint32_t references;
};

struct vgpu_bound {
    struct vgpu_bound *next;
    struct vgpu_block *block;
    CUdevice device;
    uint64_t offset, size;
};

/* A handle or a mapping of a block. One chain per bucket; handles and addresses have separate tables. */
struct vgpu_link {
    struct vgpu_link *next;
    uint64_t key;   /* handle, or start address */
    uint64_t size;  /* of a mapping */
    uint32_t count; /* times this handle is held */
    struct vgpu_block *block;
};

/* Around every access to the records and the driver call that belongs to it. */
void vgpu_blocks_lock(void);
void vgpu_blocks_unlock(void);

/* Call the following with the lock held. */
struct vgpu_link *vgpu_block_handle(CUmemGenericAllocationHandle handle); /* NULL: unknown */
/* the mapping around the address; NULL: none */
struct vgpu_link *vgpu_block_around(uint64_t address);
/* Number of blocks in host memory that the program has made on a card. */
extern atomic_uint vgpu_blocks_spilled;
/* Books a handle that the driver has returned. */
void vgpu_block_add_handle(struct vgpu_link *link);
/* Ends a block with its last reference. */
void vgpu_block_drop(struct vgpu_block *block);

/* The cost of using a part of a block. */
struct vgpu_payment {
    struct vgpu_supplement *supplement; /* NULL: nothing was due */
};
/* Call before the driver's call that uses a part of a block. False: the cost exceeds the limit. */
bool vgpu_block_pay(const struct vgpu_block *block, uint64_t offset, uint64_t size, struct vgpu_payment *payment);
/* Call afterwards. A successful use tells the size: a driver that can map parts would have reported the size before. */
void vgpu_block_paid(struct vgpu_block *block, const struct vgpu_payment *payment, CUresult result);
/* Gives back the charges of exported blocks that were released and whose descriptors were closed, on any card. True:
 * there were some. Only the driver notices the close, so vgpu checks before a refusal and in cuMemGetInfo. */
bool vgpu_blocks_give_back(void);
/* In a forked child: ledger/process.h. */
void vgpu_blocks_forget(void);
#endif
