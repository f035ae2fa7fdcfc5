/* Plays containers that are busy without end: writes into their usage files what the library would.
 *
 * Usage: load SHORT|LONG DIR...; ends when its standard input does. Every millisecond each container has launched for
 * 0.1 ms; in LONG each also has a measured run every 10 ms, which overlaps those of its neighbours. */
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "vgpu/region.h"

#define MS 1000000u

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void run(struct vgpu_pacer_card *pacer, uint64_t begin, uint64_t end) {
    struct vgpu_run *slot = &pacer->runs[atomic_fetch_add(&pacer->run_count, 1) % VGPU_RUNS];
    atomic_store(&slot->end_ns, 0);
    atomic_store(&slot->begin_ns, begin);
    atomic_store(&slot->end_ns, end);
}

int main(int argc, char **argv) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    const int count = argc - 2;
    struct vgpu_usage_file **usages = calloc((size_t)(count > 0 ? count : 1), sizeof *usages);
    if (count < 1 || !usages)
        return 2;
    const int lengthy = strcmp(argv[1], "LONG") == 0;
    for (int i = 0; i < count; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/usage", argv[i + 2]);
        const int fd = open(path, O_RDWR);
        usages[i] = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof **usages, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (usages[i] == MAP_FAILED) {
            perror(path);
            return 1;
        }
        close(fd);
    }
    puts("ready");
    fflush(stdout);
    for (unsigned turn = 0; poll(&input, 1, 1) == 0; turn++)
        for (int i = 0; i < count; i++) {
            const uint64_t now = now_ns();
            atomic_fetch_add(&usages[i]->pacer[0].gpu_ns, MS / 10);
            atomic_store(&usages[i]->pacer[0].wanted_until, now);
            if (lengthy && (turn + (unsigned)i) % 10 == 0)
                run(&usages[i]->pacer[0], now - 10 * MS, now - MS / 20);
        }
    return 0;
}
