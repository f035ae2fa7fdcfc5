/* The taking part of processes: registration, liveness, and the mapped files of other processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/state.h"

static void process_path(const struct sim *sim, uint32_t slot, char path[256]) {
    snprintf(path, 256, "%s/nvidia-simulated.%u", sim->dir, slot);
}

uint64_t sim_start_time(const char *name) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%s/stat", name);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *field = strrchr(text, ')'); /* the name may contain spaces; the next field is number 3 */
    for (int number = 2; field && number < 22; number++)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

bool sim_alive(struct sim *sim, uint32_t slot) {
    char path[256];
    uint64_t owner = atomic_load(&sim->state->slots[slot].owner);
    if ((owner & 3) != SIM_LIVE)
        return false;
    process_path(sim, slot, path);
    bool held = true;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        held = fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
        close(fd);
    } else {
        held = errno != ENOENT;
    }
    if (held)
        atomic_store_explicit(&sim->state->slots[slot].seen_ns, sim_now(), memory_order_relaxed);
    else
        atomic_compare_exchange_strong(&sim->state->slots[slot].owner, &owner, (owner & ~3ull) | SIM_DEAD);
    return held;
}

bool sim_self_valid(const struct sim *sim) {
    uint64_t owner = (uint64_t)sim->generation << 2 | SIM_LIVE;
    return sim->self && atomic_load_explicit(&sim->state->slots[sim->slot].owner, memory_order_relaxed) == owner;
}

static struct sim_process *map_process(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat st;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct sim_process))
        map = mmap(NULL, sizeof(struct sim_process), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return map == MAP_FAILED ? NULL : map;
}

struct sim_process *sim_peer(struct sim *sim, uint32_t slot) {
    struct sim_process *peer = __atomic_load_n(&sim->peers[slot], __ATOMIC_ACQUIRE);
    if (peer)
        return peer;
    char path[256];
    process_path(sim, slot, path);
    struct sim_process *map = map_process(path);
    if (map && !__atomic_compare_exchange_n(&sim->peers[slot], &peer, map, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        munmap(map, sizeof *map);
        return peer;
    }
    return map;
}

/* Opens and locks a slot's file. The mapping comes from another descriptor: a mapped descriptor would keep the lock
 * after the program closes it. */
static int take_file(struct sim *sim, uint32_t slot) {
    char path[256];
    const char *files = secure_getenv("VGPU_SIM_FILES");
    const int flags = O_RDWR | (files && strcmp(files, "inherited") == 0 ? 0 : O_CLOEXEC);
    process_path(sim, slot, path);
    int fd = open(path, flags | O_CREAT | O_EXCL, 0666);
    if (fd < 0 && errno == EEXIST)
        fd = open(path, flags);
    if (fd < 0)
        return -errno;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(fd, F_OFD_SETLK, &lock) != 0 || ftruncate(fd, sizeof(struct sim_process)) != 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    /* processes of other users complete this process's launches; if the file belongs to another user, it already has
     * this mode */
    (void)fchmod(fd, 0666);
    return fd;
}

/* Under each card's lock, because the process that advances the card writes here. */
static void describe_self(struct sim *sim, struct sim_process *self, uint32_t generation) {
    struct stat ns;
    self->pid = (int32_t)getpid();
    self->start_time = sim_start_time("self");
    self->pid_namespace = stat("/proc/self/ns/pid", &ns) == 0 ? ns.st_ino : 0;
    ssize_t length = readlink("/proc/self/exe", self->name, sizeof self->name - 1);
    self->name[length > 0 ? length : 0] = 0;
    self->kernels = sim->timing.kernels;
    for (int card = 0; card < SIM_CARDS; card++) {
        sim_acquire(sim, &sim->state->cards[card].time_lock);
        atomic_store(&self->generation, generation);
        memset(&self->cards[card], 0, sizeof self->cards[card]);
        sim_release(&sim->state->cards[card].time_lock);
    }
}

/* Chooses a slot: fresh slots while the history is short, then the dead slot that registered first. */
static int choose_slot(struct sim *sim, const bool *refused) {
    int fresh = -1, dead = -1;
    for (uint32_t i = 0; i < SIM_SLOTS; i++) {
        uint64_t state = atomic_load(&sim->state->slots[i].owner) & 3;
        if (refused[i] || (state == SIM_LIVE && sim_alive(sim, i)))
            continue;
        if (state == SIM_UNUSED) {
            fresh = (int)i;
            break;
        }
        if (dead < 0 || sim->state->slots[i].order < sim->state->slots[dead].order)
            dead = (int)i;
    }
    return fresh >= 0 && (fresh < (int)SIM_HISTORY || dead < 0) ? fresh : dead;
}

int sim_register(struct sim *sim) {
    struct sim_state *state = sim->state;
    bool refused[SIM_SLOTS] = {false};
    int slot, fd = -EAGAIN;
    sim_acquire(sim, &state->registry_lock);
    while ((slot = choose_slot(sim, refused)) >= 0) {
        fd = take_file(sim, (uint32_t)slot);
        if (fd >= 0 || (fd != -EAGAIN && fd != -EACCES))
            break;
        refused[slot] = true;
    }
    struct sim_process *self = fd >= 0 ? sim_peer(sim, (uint32_t)slot) : NULL;
    if (self) {
        uint32_t generation = (uint32_t)(atomic_load(&state->slots[slot].owner) >> 2) + 1;
        describe_self(sim, self, generation);
        state->slots[slot].order = ++state->registrations;
        if ((uint32_t)slot >= atomic_load(&state->slots_used))
            atomic_store(&state->slots_used, (uint32_t)slot + 1);
        atomic_store(&state->slots[slot].seen_ns, sim_now());
        atomic_store(&state->slots[slot].owner, (uint64_t)generation << 2 | SIM_LIVE);
        sim->lock_fd = fd;
        sim->generation = generation;
    } else if (fd >= 0) {
        close(fd);
        fd = -ENOMEM;
    }
    sim_release(&state->registry_lock);
    if (self) { /* only now, because the lock word names its holder by slot */
        sim->slot = (uint32_t)slot;
        sim->self = self;
    }
    return self ? 0 : fd;
}
