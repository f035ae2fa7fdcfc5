#define _GNU_SOURCE
#include "device_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define NVIDIA_MAJOR 195 /* devices.txt of the kernel; nvidia-uvm and others have numbers of their own on each machine */

static atomic_bool unmarked; /* an inherited one took no mark */

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

/* /dev/nvidia*, WSL's /dev/dxg, Tegra's nvmap, nvhost-* and nvgpu/...; for the simulator's file see its README. */
static bool is_of_driver(int folder, const char *number)
{
    char path[512];
    struct stat status;
    if (fstatat(folder, number, &status, 0) != 0 || !(S_ISCHR(status.st_mode) || S_ISREG(status.st_mode)))
        return false;
    if (S_ISCHR(status.st_mode) && major(status.st_rdev) == NVIDIA_MAJOR)
        return true;
    const ssize_t length = readlinkat(folder, number, path, sizeof path - 1);
    if (length <= 0)
        return false;
    path[length] = 0;
    const char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (S_ISREG(status.st_mode))
        return begins(name, "nvidia-simulated.");
    return begins(name, "nvidia") || begins(name, "nvmap") || begins(name, "nvhost") || strcmp(name, "dxg") == 0 || strstr(path, "/nvgpu/");
}

/* Calls visit for the descriptors of the driver's files until it answers true. No memory of malloc: it runs while the program is being loaded. False with
 * *hidden: they may not be seen. */
static bool any_of_driver(const char *process, bool (*visit)(int fd), bool *hidden)
{
    char path[64];
    _Alignas(struct dirent64) char entries[1024];
    bool found = false;
    long got;
    snprintf(path, sizeof path, "/proc/%s/fd", process);
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *hidden = folder < 0 && errno != ENOENT && errno != ESRCH;
    while (folder >= 0 && !found && (got = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
        for (long at = 0; at < got && !found;) {
            const struct dirent64 *entry = (const struct dirent64 *)(entries + at);
            at += entry->d_reclen;
            found = entry->d_name[0] != '.' && is_of_driver(folder, entry->d_name) && visit(atoi(entry->d_name));
        }
    }
    if (folder >= 0)
        close(folder);
    return found;
}

static bool any(int fd)
{
    (void)fd;
    return true;
}

bool vgpu_device_files_open(const char *process)
{
    bool hidden;
    return any_of_driver(process, any, &hidden) || hidden;
}

/* The mark is the signal that the open file would send: SIGIO, which it sends anyway. It stays with the file when a descriptor is moved or its number is used
 * for another one, and costs no descriptor. */
static bool mark(int fd)
{
    const int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && !(flags & O_PATH) && fcntl(fd, F_SETSIG, SIGIO) != 0)
        atomic_store(&unmarked, true);
    return false;
}

static bool is_marked(int fd)
{
    return fcntl(fd, F_GETSIG) == SIGIO;
}

void vgpu_device_files_mark(void)
{
    bool hidden;
    const int saved = errno;
    any_of_driver("self", mark, &hidden);
    if (hidden) /* no descriptor is free, or no /proc is there */
        atomic_store(&unmarked, true);
    errno = saved;
}

bool vgpu_device_files_marked(void)
{
    bool hidden;
    if (atomic_load(&unmarked))
        return vgpu_device_files_open("self");
    return any_of_driver("self", is_marked, &hidden) || hidden;
}
