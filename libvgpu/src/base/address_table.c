/* A lock-free table from a driver function's address to its hook. */
#include "base/address_table.h"

#include <stdatomic.h>

#define SLOTS 2048
#define BEING_WRITTEN 1 /* cannot be the address of a function */

static struct {
    _Atomic uintptr_t address; /* set last: a thread that finds the address also finds its hook */
    atomic_int hook;
} slots[SLOTS];

static uint32_t slot_of(uintptr_t address) {
    return (uint32_t)((address * 0x9e3779b97f4a7c15ull) >> 32) % SLOTS;
}

/* Skips a slot that another thread is writing, or was writing when the process was forked. Then the address may be in
 * the table twice, with the same hook. */
void vgpu_addresses_put(int hook, uintptr_t address) {
    uint32_t slot = slot_of(address);
    for (int i = 0; i < SLOTS; i++, slot = (slot + 1) % SLOTS) {
        uintptr_t there = atomic_load(&slots[slot].address);
        if (there == address)
            return;
        if (there == 0 && atomic_compare_exchange_strong(&slots[slot].address, &there, BEING_WRITTEN)) {
            atomic_store(&slots[slot].hook, hook);
            atomic_store(&slots[slot].address, address);
            return;
        }
    }
}

int vgpu_addresses_find(uintptr_t address) {
    uint32_t slot = slot_of(address);
    for (int i = 0; i < SLOTS; i++, slot = (slot + 1) % SLOTS) {
        const uintptr_t there = atomic_load(&slots[slot].address);
        if (there == 0)
            return -1;
        if (there == address)
            return atomic_load(&slots[slot].hook);
    }
    return -1;
}
