/* Which hook stands in front of a function of the driver, by its address. Threads fill it while others read. */
#ifndef VGPU_ADDRESS_TABLE_H
#define VGPU_ADDRESS_TABLE_H
#include <stdint.h>

/* Remembers it; of one address the first hook counts. What this thread has put, it finds. */
void vgpu_addresses_put(int hook, uintptr_t address);
/* -1: unknown. */
int vgpu_addresses_find(uintptr_t address);
#endif
