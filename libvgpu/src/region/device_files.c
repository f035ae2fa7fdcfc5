/* Finds open device files of the driver. */
#define _GNU_SOURCE
#include "region/device_files.h"

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

/* devices.txt of the kernel; the numbers of nvidia-uvm and others differ per machine */
#define NVIDIA_MAJOR 195

static atomic_bool unmarked; /* an inherited device file took no mark */

static bool begins(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

/* /dev/nvidia*, WSL's /dev/dxg, Tegra's nvmap, nvhost-* and nvgpu/...; the simulator's README describes its file. */
static bool is_of_driver(int folder, const char *number) {
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
    return begins(name, "nvidia") || begins(name, "nvmap") || begins(name, "nvhost") || strcmp(name, "dxg") == 0 ||
           strstr(path, "/nvgpu/");
}

struct search {
    bool (*visit)(int fd, void *context);
    void *context;
    bool of_driver; /* only the driver's files */
    bool hidden;    /* result: the descriptors cannot be listed */
};

/* Visits descriptors until a visit returns true. Does not use malloc: it runs while the program is being loaded. */
static bool search(const char *process, struct search *what) {
    char path[64];
    _Alignas(struct dirent64) char entries[1024];
    bool found = false;
    long got;
    snprintf(path, sizeof path, "/proc/%s/fd", process);
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    what->hidden = folder < 0 && errno != ENOENT && errno != ESRCH;
    while (folder >= 0 && !found && (got = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
        for (long at = 0; at < got && !found;) {
            const struct dirent64 *entry = (const struct dirent64 *)(entries + at);
            at += entry->d_reclen;
            found = entry->d_name[0] != '.' && (!what->of_driver || is_of_driver(folder, entry->d_name)) &&
                    what->visit(atoi(entry->d_name), what->context);
        }
    }
    if (folder >= 0)
        close(folder);
    return found;
}

static bool any(int fd, void *context) {
    (void)context;
    return fd >= 0;
}

bool vgpu_device_files_open(const char *process) {
    struct search what = {.visit = any, .of_driver = true};
    return search(process, &what) || what.hidden;
}

bool vgpu_inherited_mark(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    return flags < 0 || flags & O_PATH || fcntl(fd, F_SETSIG, SIGIO) == 0;
}

bool vgpu_inherited_marked(int fd) {
    return fcntl(fd, F_GETSIG) == SIGIO;
}

static bool mark(int fd, void *context) {
    (void)context;
    if (!vgpu_inherited_mark(fd))
        atomic_store(&unmarked, true);
    return false;
}

static bool is_marked(int fd, void *context) {
    (void)context;
    return vgpu_inherited_marked(fd);
}

static bool passes(int fd, void *context) {
    (void)context;
    const int flags = fcntl(fd, F_GETFD);
    return flags >= 0 && !(flags & FD_CLOEXEC);
}

void vgpu_device_files_mark(void) {
    struct search what = {.visit = mark, .of_driver = true};
    const int saved = errno;
    search("self", &what);
    if (what.hidden) /* no free descriptor, or no /proc */
        atomic_store(&unmarked, true);
    errno = saved;
}

bool vgpu_device_files_marked(void) {
    struct search what = {.visit = is_marked, .of_driver = true};
    if (atomic_load(&unmarked))
        return vgpu_device_files_open("self");
    return search("self", &what) || what.hidden;
}

bool vgpu_device_files_pass(void) {
    struct search what = {.visit = passes, .of_driver = true};
    return search("self", &what) || what.hidden;
}

bool vgpu_descriptors_any(bool (*visit)(int fd, void *context), void *context) {
    struct search what = {.visit = visit, .context = context};
    return search("self", &what);
}
