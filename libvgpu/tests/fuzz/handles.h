/* What a program has made, by kind, and the families of operations that work on it. */
#ifndef VGPU_FUZZ_HANDLES_H
#define VGPU_FUZZ_HANDLES_H
#define __CUDA_API_VERSION_INTERNAL /* every version of every entry point under its own symbol */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>

#include "play.h"

#define GRANULE (2 * MIB)
#define SLOTS 32u

/* Handles by kind. A slot keeps its handle after the end of what it names, so that it can be used once too often; the
 * logs forget nothing. */
enum kind {
    POINTER,
    PHYSICAL,
    RANGE,
    ARRAY,
    MIPMAP,
    POOL,
    STREAM,
    CONTEXT,
    GRAPH,
    EXEC,
    HOST,
    IMPORTED,
    EXTERNAL,
    MULTICAST,
    DESCRIPTOR,
    KINDS
};
extern _Atomic uint64_t slots[KINDS][SLOTS];
extern struct log {
    _Atomic unsigned count;
    uint64_t handle[MAX_OPERATIONS * 4];
    uint64_t size[MAX_OPERATIONS * 4];
} logs[KINDS];
extern atomic_bool pools_used;
extern bool concurrent;        /* several threads play */
extern pthread_rwlock_t rules; /* destroying what another thread uses is no program at all */

void made(enum kind kind, unsigned slot, uint64_t handle, uint64_t size);
/* 250 to 255: no handle at all, of several sorts. */
uint64_t handle_of(enum kind kind, unsigned slot);
/* How many entries of a log are there. */
unsigned logged(enum kind kind);
void handles_forget(void);
/* Closes the descriptors of exported blocks. */
void close_exported(void);

uint64_t size_of_range(uint64_t base);
/* Bytes of an allocation; from 128 on by the limit of a card and what is left of it. */
uint64_t bytes_of(uint8_t code, unsigned card);
uint64_t granules(uint8_t code);
CUstream stream_of(uint8_t code);
unsigned card_here(void);

/* Families: `which` of each is explained by its source alone. */
CUresult allocate(struct operation op, bool looked);
CUresult allocate_other(struct operation op, unsigned which);
CUresult allocate_ordered(struct operation op, unsigned which);
CUresult keep_pointer(CUresult result, unsigned slot, const CUdeviceptr *pointer);
CUresult free_pointer(struct operation op, unsigned which);
CUresult array(struct operation op, unsigned which);
CUresult host(struct operation op, unsigned which);
CUresult virtual(struct operation op, unsigned which);
CUresult ipc(struct operation op);
CUresult external(struct operation op);
CUresult shareable(struct operation op);
CUresult multicast(struct operation op);
CUresult launch(struct operation op);
CUresult pool(struct operation op, unsigned which);
CUresult stream(struct operation op, unsigned which);
CUresult capture(struct operation op, unsigned which);
CUresult context(struct operation op, unsigned which);
CUresult graph(struct operation op, unsigned which);
/* Forgets how much graphs have had reserved. */
void graphs_begin(void);
#endif
