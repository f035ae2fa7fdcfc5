/* Maps the address of a driver function to its hook. Threads may read while others fill it. */
#ifndef VGPU_ADDRESS_TABLE_H
#define VGPU_ADDRESS_TABLE_H
#include <stdint.h>

/* Adds a hook; the first hook of an address counts. A thread always finds what it has added. */
void vgpu_addresses_put(int hook, uintptr_t address);
/* -1: unknown. */
int vgpu_addresses_find(uintptr_t address);
#endif
