/* The pid by which the caller knows a process.
 *
 * The driver translates pids into the caller's pid namespace. It leaves out processes that are neither in it nor below
 * it: NVIDIA's open-gpu-kernel-modules, gpuGetProcWithObject in src/nvidia/src/kernel/gpu/gpu_rmapi.c and
 * os_find_ns_pid in kernel-open/nvidia/os-interface.c. (Older drivers, up to 2021, returned the host's pids to every
 * caller: nvidia-docker issue 1483.) */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nvml/library.h"

static uint64_t namespace_of(const char *name) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%s/ns/pid", name);
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

/* A pid in /proc is the caller's only if /proc belongs to the caller's namespace. */
static bool shows_our_namespace(void) {
    char name[16];
    ssize_t length = readlink("/proc/self", name, sizeof name - 1);
    name[length > 0 ? length : 0] = 0;
    return atoi(name) == (int)getpid();
}

/* The last number of "NSpid:\t1234\t12" is the process's own pid. */
static int innermost_pid(const char *name) {
    char path[64], line[512];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%s/status", name);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *last = strncmp(line, "NSpid:", 6) == 0 ? strrchr(line, '\t') : NULL;
        found = last ? atoi(last + 1) : 0;
    }
    if (file)
        fclose(file);
    return found;
}

/* The driver needs no permission to read a process, so it also lists processes whose namespace /proc hides from the
 * caller. */
static bool is_it(const char *name, const struct sim_process *process) {
    uint64_t space = namespace_of(name);
    return (space == 0 || space == process->pid_namespace) && sim_start_time(name) == process->start_time &&
           innermost_pid(name) == process->pid;
}

static unsigned search(const struct sim_process *process) {
    unsigned found = 0;
    struct dirent *entry;
    DIR *proc = shows_our_namespace() ? opendir("/proc") : NULL;
    while (proc && !found && (entry = readdir(proc))) {
        char name[16];
        unsigned pid = (unsigned)strtoul(entry->d_name, NULL, 10); /* 0: not a process */
        snprintf(name, sizeof name, "%u", pid);
        if (pid && is_it(name, process))
            found = pid;
    }
    if (proc)
        closedir(proc);
    return found;
}

unsigned pid_for_caller(uint32_t slot, const struct sim_process *process) {
    /* generation << 32 | pid; the namespace in which these are valid */
    static _Atomic uint64_t known[SIM_SLOTS], known_in;
    uint64_t own = namespace_of("self");
    if (process->pid_namespace == own)
        return (unsigned)process->pid;
    if (atomic_exchange(&known_in, own) != own) /* this is a fork of a process with known pids, in a new namespace */
        for (uint32_t i = 0; i < SIM_SLOTS; i++)
            atomic_store(&known[i], 0);
    uint32_t generation = atomic_load(&process->generation);
    uint64_t before = atomic_load(&known[slot]);
    if (before >> 32 == generation && before)
        return (unsigned)before;
    unsigned pid = search(process);
    if (pid)
        atomic_store(&known[slot], (uint64_t)generation << 32 | pid);
    return pid;
}
