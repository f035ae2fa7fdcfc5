/* The state directory: finds, makes and opens it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/state.h"

static int make_directories(const char *dir, mode_t mode) {
    char path[256];
    if (snprintf(path, sizeof path, "%s", dir) >= (int)sizeof path)
        return -ENAMETOOLONG;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0755) != 0 && errno != EEXIST)
            return -errno;
        *slash = '/';
    }
    if (mkdir(path, mode) != 0)
        return errno == EEXIST ? 0 : -errno;
    return chmod(path, mode) == 0 ? 0 : -errno;
}

int sim_directory(char *out, unsigned long size) {
    const char *explicit = secure_getenv("VGPU_SIM_DIR"), *runtime = secure_getenv("XDG_RUNTIME_DIR");
    int length;
    if (explicit && *explicit)
        length = snprintf(out, size, "%s", explicit);
    else if (geteuid() == 0 && access("/run", W_OK) == 0)
        length = snprintf(out, size, "/run/vgpu/local/simulator");
    else if (runtime && *runtime)
        length = snprintf(out, size, "%s/vgpu/simulator", runtime);
    else
        length = snprintf(out, size, "/tmp/vgpu-%u/simulator", (unsigned)geteuid());
    return length < (int)size ? 0 : -ENAMETOOLONG;
}

static void read_boot_id(char out[40]) {
    memset(out, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t length = read(fd, out, 39);
    close(fd);
    out[length > 0 ? strcspn(out, "\n") : 0] = 0;
}

static struct sim_state *map_state(const char *dir, int *error) {
    char path[256];
    struct stat st;
    snprintf(path, sizeof path, "%s/state", dir);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        *error = -errno;
        return NULL;
    }
    void *map = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct sim_state))
        map = mmap(NULL, sizeof(struct sim_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    struct sim_state *state = map == MAP_FAILED ? NULL : map;
    if (state && (state->magic != SIM_MAGIC || state->abi != SIM_ABI || state->size != sizeof *state ||
                  !sim_profile_at(state->profile) || state->card_count > SIM_CARDS)) {
        munmap(state, sizeof *state);
        state = NULL;
    }
    *error = state ? 0 : -EPROTO;
    return state;
}

static bool of_this_boot(const struct sim_state *state) {
    char boot[40];
    read_boot_id(boot);
    return memcmp(boot, state->boot_id, sizeof boot) == 0;
}

static int make_uuid(char out[48], const char *kind) {
    unsigned char b[16];
    /* getrandom needs a newer glibc than the oldest supported one */
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, b, sizeof b) : -1;
    if (fd >= 0)
        close(fd);
    if (length != (ssize_t)sizeof b)
        return -EIO;
    b[6] = (unsigned char)((b[6] & 0x0f) | 0x40);
    b[8] = (unsigned char)((b[8] & 0x3f) | 0x80);
    snprintf(out, 48, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", kind, b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return 0;
}

/* Writes a new state file next to the old one and renames it into place. It keeps the UUIDs of `old`, a state of
 * another boot. */
static int write_state(const char *dir, const char *spec, int profile, uint32_t cards, const struct sim_state *old) {
    char temporary[256], path[256];
    snprintf(temporary, sizeof temporary, "%s/.state.%d", dir, (int)getpid());
    snprintf(path, sizeof path, "%s/state", dir);
    int fd = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    void *map = MAP_FAILED;
    if (fchmod(fd, 0666) == 0 && ftruncate(fd, sizeof(struct sim_state)) == 0)
        map = mmap(NULL, sizeof(struct sim_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = map == MAP_FAILED ? -errno : 0;
    close(fd);
    if (!error) {
        struct sim_state *state = map;
        state->magic = SIM_MAGIC;
        state->abi = SIM_ABI;
        state->size = sizeof *state;
        state->profile = (uint32_t)profile;
        state->card_count = cards;
        atomic_store(&state->slice_ns, SIM_SLICE_NS);
        atomic_store(&state->switch_ns, SIM_SWITCH_NS);
        read_boot_id(state->boot_id);
        snprintf(state->spec, sizeof state->spec, "%s", spec);
        for (uint32_t i = 0; i < cards && !error; i++)
            if (old && i < old->card_count)
                memcpy(state->cards[i].uuid, old->cards[i].uuid, sizeof old->cards[i].uuid);
            else
                error = make_uuid(state->cards[i].uuid, sim_profile_at((uint32_t)profile)->mig ? "MIG" : "GPU");
        if (old)
            memcpy(state->board_uuid, old->board_uuid, sizeof old->board_uuid);
        else if (!error)
            error = make_uuid(state->board_uuid, "GPU");
        munmap(map, sizeof(struct sim_state));
        if (!error)
            error = rename(temporary, path) == 0 ? 0 : -errno;
    }
    if (error)
        unlink(temporary);
    return error;
}

int vgpu_sim_create(const char *dir, const char *spec) {
    uint32_t cards;
    int profile = sim_spec_parse(spec, &cards), error;
    if (profile < 0)
        return -EINVAL;
    char path[256];
    if (snprintf(path, sizeof path, "%s/.lock", dir) >= 200)
        return -ENAMETOOLONG;
    /* simulated containers of any user share the cards; the default directories are private by their parent directory
     */
    if ((error = make_directories(dir, 01777)) != 0)
        return error;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    (void)fchmod(fd, 0666); /* fails if another user made the file, but then that user has set the mode */
    while (flock(fd, LOCK_EX) != 0)
        if (errno != EINTR) {
            error = -errno;
            close(fd);
            return error;
        }
    struct sim_state *old = map_state(dir, &error);
    bool same = old && strcmp(old->spec, spec) == 0;
    if (old && of_this_boot(old))
        error = same ? 0 : -EEXIST;
    else
        error = write_state(dir, spec, profile, cards, same ? old : NULL);
    if (old)
        munmap(old, sizeof *old);
    close(fd);
    return error;
}

int sim_open(struct sim *sim, const char *dir) {
    int error = 0;
    memset(sim, 0, sizeof *sim);
    sim->lock_fd = -1;
    if (snprintf(sim->dir, sizeof sim->dir, "%s", dir) >= (int)sizeof sim->dir)
        return -ENAMETOOLONG;
    sim->state = map_state(dir, &error);
    if (sim->state && !of_this_boot(sim->state)) {
        char spec[sizeof sim->state->spec];
        memcpy(spec, sim->state->spec, sizeof spec);
        munmap(sim->state, sizeof *sim->state);
        error = vgpu_sim_create(dir, spec);
        sim->state = error ? NULL : map_state(dir, &error);
    }
    if (sim->state)
        sim->profile = sim_profile_at(sim->state->profile);
    return error;
}

void sim_close(struct sim *sim) {
    for (uint32_t i = 0; i < SIM_SLOTS; i++)
        if (sim->peers[i])
            munmap(sim->peers[i], sizeof *sim->peers[i]);
    if (sim->state)
        munmap(sim->state, sizeof *sim->state);
    if (sim->lock_fd >= 0)
        close(sim->lock_fd);
    memset(sim, 0, sizeof *sim);
    sim->lock_fd = -1;
}

int sim_open_environment(struct sim *sim) {
    char dir[200];
    const char *spec = secure_getenv("VGPU_SIMULATE");
    const char *driver = secure_getenv("VGPU_SIM_DRIVER");
    int error = sim_directory(dir, sizeof dir);
    if (driver && *driver && !sim_driver_named(driver)) {
        fprintf(stderr, "vgpu simulator: VGPU_SIM_DRIVER=%s: not one of %s\n", driver, vgpu_sim_drivers());
        return -EINVAL;
    }
    if (!error && spec && *spec) {
        error = vgpu_sim_create(dir, spec);
        if (error == -EINVAL)
            fprintf(stderr,
                    "vgpu simulator: VGPU_SIMULATE=%s: not PROFILE[xN][@DRIVER] with a profile of %s, N from 1 to %d "
                    "and a driver of %s\n",
                    spec, vgpu_sim_profiles(), SIM_CARDS, vgpu_sim_drivers());
        else if (error == -EEXIST)
            fprintf(stderr,
                    "vgpu simulator: VGPU_SIMULATE=%s: %s simulates something else; remove it or set another "
                    "VGPU_SIM_DIR\n",
                    spec, dir);
        else if (error)
            fprintf(stderr, "vgpu simulator: cannot make the state in %s: %s\n", dir, strerror(-error));
    }
    if (!error)
        error = sim_open(sim, dir);
    return error ? error : sim_timing_read(sim);
}
