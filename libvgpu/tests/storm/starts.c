/* Many processes that begin at once, spread over containers: each calls cuInit, asks for the card's memory and takes 2
 * MiB of it.
 *
 * starts FOLDER PROCESSES CONTAINERS     (LD_PRELOAD, VGPU_SIM_DIR, VGPU_SIMULATE from the environment)
 *
 * Prints the time from the common start until the last one is ready. Exit 1 when one failed.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arena.h"

struct shared {
    _Atomic uint32_t ready, failed;
    atomic_bool begin;
    _Atomic uint64_t last, longest;
};

static void at_least(_Atomic uint64_t *most, uint64_t value) {
    uint64_t seen = atomic_load(most);
    while (value > seen && !atomic_compare_exchange_weak(most, &seen, value)) {
    }
}

static void member(struct shared *shared, int gate) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}}};
    CUmemGenericAllocationHandle handle;
    size_t bytes;
    char byte;
    atomic_fetch_add(&shared->ready, 1);
    (void)!read(gate, &byte, 1); /* the end of the pipe is for all at once */
    uint64_t begin = arena_now_ns();
    if (cuInit(0) || cuDeviceTotalMem(&bytes, 0) || cuMemCreate(&handle, 2 * MIB, &properties, 0))
        atomic_fetch_add(&shared->failed, 1);
    uint64_t end = arena_now_ns();
    at_least(&shared->last, end);
    at_least(&shared->longest, end - begin);
}

int main(int count, char **arguments) {
    arena_need(count == 4, "usage: starts FOLDER PROCESSES CONTAINERS");
    unsigned processes = (unsigned)atoi(arguments[2]), containers = (unsigned)atoi(arguments[3]);
    struct vgpu_sim_card card = arena_card();
    struct shared *shared = arena_shared(sizeof *shared);
    int gate[2];
    arena_need(processes > 0 && containers > 0 && pipe(gate) == 0, "usage: starts FOLDER PROCESSES CONTAINERS");
    for (unsigned i = 0; i < containers; i++)
        vgpu_region_close(arena_container(arguments[1], i, &card, 0, 1024 * MIB));
    for (unsigned i = 0; i < processes; i++) {
        arena_enter(arguments[1], i % containers);
        pid_t pid = fork();
        arena_need(pid >= 0, "fork");
        if (pid == 0) {
            close(gate[1]);
            member(shared, gate[0]);
            _exit(0);
        }
    }
    while (atomic_load(&shared->ready) < processes)
        usleep(1000);
    uint64_t begin = arena_now_ns();
    close(gate[1]);
    while (wait(NULL) > 0) {
    }
    printf("processes %u containers %u all_ms %.1f longest_ms %.1f failed %u\n", processes, containers,
           (double)(atomic_load(&shared->last) - begin) / 1e6, (double)atomic_load(&shared->longest) / 1e6,
           atomic_load(&shared->failed));
    return atomic_load(&shared->failed) != 0;
}
