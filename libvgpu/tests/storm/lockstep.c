/* Two processes of a container with room for 1 GiB and both contexts ask for 600 MiB at the same moment, again and
 * again.
 *
 * lockstep FOLDER TRIALS     (LD_PRELOAD, VGPU_SIM_DIR, VGPU_SIMULATE from the environment)
 *
 * Prints in how many trials none, one and both were granted. Exit 1 unless it was one, always.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arena.h"

struct shared {
    struct meeting meeting;
    _Atomic uint32_t granted[1 << 20];
};

static void member(struct shared *shared, unsigned trials) {
    CUcontext context;
    arena_need(cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
                   cuCtxSetCurrent(context) == CUDA_SUCCESS,
               "no context");
    for (unsigned trial = 0; trial < trials; trial++) {
        CUdeviceptr pointer;
        arena_meet(&shared->meeting, 2, 2 * trial + 1);
        bool granted = cuMemAlloc(&pointer, 600 * MIB) == CUDA_SUCCESS;
        atomic_fetch_add(&shared->granted[trial], granted);
        arena_meet(&shared->meeting, 2, 2 * trial + 2);
        if (granted)
            cuMemFree(pointer);
    }
}

int main(int count, char **arguments) {
    unsigned trials = count == 3 ? (unsigned)atoi(arguments[2]) : 0;
    arena_need(trials > 0 && trials <= 1 << 20, "usage: lockstep FOLDER TRIALS");
    struct vgpu_sim_card card = arena_card();
    struct shared *shared = arena_shared(sizeof *shared);
    unsigned outcomes[3] = {0};
    arena_container(arguments[1], 0, &card, 2, 1024 * MIB);
    arena_enter(arguments[1], 0);
    pid_t pids[2];
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        arena_need(pids[i] >= 0, "fork");
        if (pids[i] == 0) {
            member(shared, trials);
            _exit(0);
        }
    }
    for (int i = 0; i < 2; i++) {
        int status;
        waitpid(pids[i], &status, 0);
        arena_need(status == 0, "a process failed");
    }
    for (unsigned trial = 0; trial < trials; trial++)
        outcomes[atomic_load(&shared->granted[trial])]++;
    printf("trials %u none %u one %u both %u\n", trials, outcomes[0], outcomes[1], outcomes[2]);
    return outcomes[1] != trials;
}
