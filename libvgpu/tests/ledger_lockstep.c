/* Two processes ask for 600 MiB of 1 GiB at the same moment, TRIALS times: prints in how many trials none, one and both
 * were granted. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger/ledger.h"

struct shared {
    _Atomic unsigned arrived;
    _Atomic unsigned granted[1 << 20];
};

static void meet(struct shared *shared, unsigned meeting) {
    atomic_fetch_add(&shared->arrived, 1);
    while (atomic_load(&shared->arrived) < 2 * meeting)
        sched_yield();
}

static void run(struct shared *shared, unsigned trials) {
    const uint64_t bytes = UINT64_C(600) << 20;
    struct vgpu_ticket ticket;
    for (unsigned trial = 0; trial < trials; trial++) {
        meet(shared, 2 * trial + 1);
        const bool granted = vgpu_charge(0, VGPU_DEVICE_BYTES, bytes, &ticket);
        atomic_fetch_add(&shared->granted[trial], granted);
        meet(shared, 2 * trial + 2);
        if (granted)
            vgpu_release(ticket, bytes);
    }
}

int main(int count, char **arguments) {
    const unsigned trials = count == 2 ? (unsigned)atoi(arguments[1]) : 0;
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || trials == 0 || trials > 1 << 20)
        return 2;
    const pid_t child = fork();
    run(shared, trials);
    if (child == 0)
        _exit(0);
    waitpid(child, NULL, 0);
    unsigned outcomes[3] = {0};
    for (unsigned trial = 0; trial < trials; trial++)
        outcomes[shared->granted[trial]]++;
    printf("none %u one %u both %u left %llu\n", outcomes[0], outcomes[1], outcomes[2],
           (unsigned long long)vgpu_used(0, VGPU_DEVICE_BYTES));
    return 0;
}
