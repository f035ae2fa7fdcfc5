/* Plays what a limited container writes into its usage file, and tells what the arbiter has written into its limits.
 *
 * Usage: arbiter_client DIR. Commands on stdin, one answer line each; times in ns, relative to now where it says so:
 *   want CARD NS        it has work until so long from now (negative: it had)
 *   use CARD NS         this much GPU time more
 *   throttled CARD NS   launches waited for so long
 *   run CARD BEGIN END  a measured launch, relative to now
 *   open CARD BEGIN     one whose writer was killed half-way
 *   take CARD           the refund is applied
 *   told CARD           nothing
 *   cut                 cuts the usage file short
 * Each answer: age of the heartbeat (-1: none), neighbours, share, yield, refund. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "vgpu/region.h"

static struct vgpu_limits_file *limits;
static struct vgpu_usage_file *usage;
static char usage_path[4096];

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *map(const char *dir, const char *name, size_t size, int flags, int protection) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, flags);
    void *address = fd < 0 ? MAP_FAILED : mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        perror(path);
        exit(1);
    }
    close(fd);
    return address;
}

static void add_run(struct vgpu_pacer_card *pacer, uint64_t begin, uint64_t end) {
    struct vgpu_run *run = &pacer->runs[atomic_fetch_add(&pacer->run_count, 1) % VGPU_RUNS];
    atomic_store(&run->end_ns, 0);
    atomic_store(&run->begin_ns, begin);
    if (end)
        atomic_store(&run->end_ns, end);
}

static void obey(const char *command, unsigned card, int64_t first, int64_t second) {
    struct vgpu_pacer_card *pacer = &usage->pacer[card];
    const uint64_t now = now_ns();
    if (strcmp(command, "want") == 0)
        atomic_store(&pacer->wanted_until, now + (uint64_t)first);
    else if (strcmp(command, "use") == 0)
        atomic_fetch_add(&pacer->gpu_ns, (uint64_t)first);
    else if (strcmp(command, "throttled") == 0)
        atomic_fetch_add(&pacer->throttled_ns, (uint64_t)first);
    else if (strcmp(command, "run") == 0)
        add_run(pacer, now + (uint64_t)first, now + (uint64_t)second);
    else if (strcmp(command, "open") == 0)
        add_run(pacer, now + (uint64_t)first, 0);
    else if (strcmp(command, "take") == 0) {
        const uint64_t refund = atomic_load(&limits->arbiter[card].refund_ns);
        atomic_fetch_sub(&pacer->gpu_ns, refund - atomic_exchange(&pacer->refund_taken, refund));
    } else if (strcmp(command, "cut") == 0) {
        if (truncate(usage_path, 0) != 0)
            perror(usage_path);
    }
    const uint64_t beat = atomic_load(&limits->arbiter[card].heartbeat_ns);
    printf("%" PRId64 " %u %u %u %" PRIu64 "\n", beat ? (int64_t)(now - beat) : -1,
           atomic_load(&limits->arbiter[card].neighbours), atomic_load(&limits->arbiter[card].share),
           atomic_load(&limits->arbiter[card].yield), atomic_load(&limits->arbiter[card].refund_ns));
    fflush(stdout);
}

int main(int argc, char **argv) {
    char line[256], command[32];
    if (argc != 2)
        return 2;
    limits = map(argv[1], "limits", sizeof *limits, O_RDONLY, PROT_READ);
    usage = map(argv[1], "usage", sizeof *usage, O_RDWR, PROT_READ | PROT_WRITE);
    snprintf(usage_path, sizeof usage_path, "%s/usage", argv[1]);
    while (fgets(line, sizeof line, stdin)) {
        unsigned card = 0;
        int64_t first = 0, second = 0;
        sscanf(line, "%31s %u %" SCNd64 " %" SCNd64, command, &card, &first, &second);
        obey(command, card % VGPU_MAX_CARDS, first, second);
    }
    return 0;
}
