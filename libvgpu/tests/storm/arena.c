/* Makes the containers and shared memory of the storms. */
#define _GNU_SOURCE
#include "arena.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void arena_need(bool good, const char *what) {
    if (good)
        return;
    fprintf(stderr, "storm: %s (%s)\n", what, strerror(errno));
    exit(2);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    arena_need(value && value[0], name);
    return value;
}

struct vgpu_sim_card arena_truth(void) {
    struct vgpu_sim_card card;
    arena_need(vgpu_sim_cards(variable("VGPU_SIM_DIR"), &card, 1) == 1, "the simulated card cannot be read");
    return card;
}

struct vgpu_sim_card arena_card(void) {
    arena_need(vgpu_sim_create(variable("VGPU_SIM_DIR"), variable("VGPU_SIMULATE")) == 0, "no simulated card");
    return arena_truth();
}

static void path_of(char path[512], const char *folder, unsigned number) {
    snprintf(path, 512, "%s/container.%u", folder, number);
}

vgpu_region *arena_container(const char *folder, unsigned number, const struct vgpu_sim_card *card, unsigned contexts,
                             uint64_t bytes) {
    struct vgpu_limits limits = {.card_count = 1};
    vgpu_region *region = NULL;
    char path[512];
    memcpy(limits.cards[0].uuid, card->uuid, sizeof limits.cards[0].uuid);
    limits.cards[0].context_bytes = card->context_bytes;
    limits.cards[0].memory = limits.cards[0].guarantee = bytes + contexts * card->context_bytes;
    path_of(path, folder, number);
    arena_need(mkdir(path, 0700) == 0, path);
    arena_need(vgpu_region_create(path, &limits) == 0 && vgpu_region_open(path, 1, &region) == 0, "no region");
    return region;
}

void arena_enter(const char *folder, unsigned number) {
    char path[512];
    path_of(path, folder, number);
    arena_need(setenv("VGPU_DIR", path, 1) == 0, "environment");
}

void *arena_shared(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    arena_need(memory != MAP_FAILED, "no shared memory");
    return memory;
}

uint64_t arena_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool arena_limited(void) {
    const char *preloaded = getenv("LD_PRELOAD");
    return preloaded && strstr(preloaded, "libvgpu");
}

void arena_meet(struct meeting *meeting, uint32_t count, uint32_t number) {
    atomic_fetch_add(&meeting->arrived, 1);
    while (atomic_load(&meeting->arrived) < count * number)
        sched_yield();
}
