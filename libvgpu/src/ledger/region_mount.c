/* Finds out whether the agent has given this container a region. */
#define _GNU_SOURCE
#include "ledger/region_mount.h"

#include <errno.h>
#include <linux/magic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

static bool found_at_load;

__attribute__((constructor)) static void look_at_load(void) {
    const int saved = errno;
    found_at_load = access(VGPU_MANAGED_DIR "/limits", F_OK) == 0;
    errno = saved;
}

/* The folder of a mounted file called `name`. A line is "id parent device root mount-point ...", see
 * proc_pid_mountinfo(5). Changes inside the container change mount points, never roots. */
static bool folder_of(const char *line, const char *name, char folder[static 512]) {
    char root[512], point[512];
    if (sscanf(line, "%*d %*d %*s %511s %511s", root, point) != 2)
        return false;
    char *root_name = strrchr(root, '/'), *point_name = strrchr(point, '/');
    if (!root_name || !point_name || strcmp(root_name + 1, name) != 0 || strcmp(point_name + 1, name) != 0)
        return false;
    *root_name = 0;
    memcpy(folder, root, sizeof root);
    return true;
}

#define REMEMBERED 64

static uint32_t hash_of(const char *text) {
    uint32_t hash = 2166136261u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash;
}

/* Whether both files are mounted, each by itself, from one folder: only the agent does that. */
static bool still_mounted(bool *unsure) {
    static char line[4096]; /* only the thread that sets up uses it; too large for the stack of some threads */
    char folder[512];
    uint32_t limits[REMEMBERED], usage[REMEMBERED];
    unsigned limits_count = 0, usage_count = 0;
    struct statfs system;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    /* if a program cannot read this file, or finds another in its place, something hides the mounts */
    *unsure = !mounts && (errno == EMFILE || errno == ENFILE || errno == ENOMEM);
    if (!mounts || fstatfs(fileno(mounts), &system) != 0 || system.f_type != PROC_SUPER_MAGIC) {
        if (mounts)
            fclose(mounts);
        return true;
    }
    while (fgets(line, sizeof line, mounts)) {
        if (limits_count < REMEMBERED && folder_of(line, "limits", folder))
            limits[limits_count++] = hash_of(folder);
        else if (usage_count < REMEMBERED && folder_of(line, "usage", folder))
            usage[usage_count++] = hash_of(folder);
    }
    fclose(mounts);
    for (unsigned i = 0; i < limits_count; i++)
        for (unsigned j = 0; j < usage_count; j++)
            if (limits[i] == usage[j])
                return true;
    return false;
}

bool vgpu_region_elsewhere(bool *unsure) {
    *unsure = false;
    return found_at_load || still_mounted(unsure);
}
