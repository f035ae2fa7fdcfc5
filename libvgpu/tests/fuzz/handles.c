/* Keeps what a program of the fuzz target has made. */
#define _GNU_SOURCE
#include "handles.h"

#include <string.h>

_Atomic uint64_t slots[KINDS][SLOTS];
struct log logs[KINDS];
bool concurrent;

void made(enum kind kind, unsigned slot, uint64_t handle, uint64_t size) {
    unsigned at = atomic_fetch_add(&logs[kind].count, 1);
    if (at < sizeof logs[kind].handle / sizeof *logs[kind].handle) {
        logs[kind].handle[at] = handle;
        logs[kind].size[at] = size;
    }
    atomic_store(&slots[kind][slot % SLOTS], handle);
}

uint64_t handle_of(enum kind kind, unsigned slot) {
    if (slot >= 250)
        return slot == 250 ? 0 : slot == 251 ? 0xdead000 : slot == 252 ? UINT64_MAX : (uint64_t)(uintptr_t)&slots;
    return atomic_load(&slots[kind][slot % SLOTS]);
}

uint64_t size_of_range(uint64_t base) {
    unsigned count = atomic_load(&logs[RANGE].count);
    for (unsigned i = 0; i < count; i++)
        if (logs[RANGE].handle[i] == base)
            return logs[RANGE].size[i];
    return GRANULE;
}

uint64_t bytes_of(uint8_t code, unsigned card) {
    static const uint64_t fixed[] = {1,
                                     511,
                                     512,
                                     4096,
                                     MIB - 1,
                                     MIB,
                                     2 * MIB,
                                     2 * MIB + 1,
                                     3 * MIB,
                                     10 * MIB,
                                     31 * MIB,
                                     32 * MIB,
                                     32 * MIB + 1,
                                     33 * MIB,
                                     64 * MIB,
                                     100 * MIB,
                                     UINT64_C(1) << 32,
                                     UINT64_C(1) << 40,
                                     UINT64_C(1) << 63,
                                     UINT64_MAX,
                                     UINT64_MAX - 511,
                                     0,
                                     0xffffffff};
    if (code < 128)
        return (uint64_t)(code + 1) << 12;
    card %= LIMITED;
    switch (code) {
    case 128: return world_limit(card);
    case 129: return world_limit(card) + 1;
    case 130: return world_limit(card) / 2;
    case 131: return world_left(card);
    case 132: return world_left(card) + 1;
    case 133: return world_left(card) / 2;
    case 134: return world_left(card) & ~(GRANULE - 1);
    default: return fixed[code % (sizeof fixed / sizeof *fixed)];
    }
}

uint64_t granules(uint8_t code) {
    return code == 255   ? 12345
           : code == 254 ? 0
           : code == 253 ? UINT64_C(1) << 42
                         : (uint64_t)(code % 16 + 1) * GRANULE;
}

CUstream stream_of(uint8_t code) {
    switch (code % 8) {
    case 0:
    case 1: return NULL;
    case 2: return CU_STREAM_LEGACY;
    case 3: return CU_STREAM_PER_THREAD;
    default: return (CUstream)handle_of(STREAM, code >= 250 ? code : code % 4u);
    }
}

unsigned card_here(void) {
    CUdevice device = 0;
    return cuCtxGetDevice(&device) == CUDA_SUCCESS ? (unsigned)device : 0;
}

unsigned logged(enum kind kind) {
    unsigned count = atomic_load(&logs[kind].count), room = sizeof logs[kind].handle / sizeof *logs[kind].handle;
    return count < room ? count : room;
}

void handles_forget(void) {
    memset(slots, 0, sizeof slots);
    for (unsigned i = 0; i < KINDS; i++)
        atomic_store(&logs[i].count, 0);
}
