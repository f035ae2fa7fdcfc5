/* Opens a library on behalf of the caller, with the caller's search path. */
#define _GNU_SOURCE
#include "loader/opening.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loader/loaded.h"
#include "loader/loader.h"

static void *real_open(const char *file, int mode) {
    void *(*function)(const char *, int) = (void *(*)(const char *, int))vgpu_linker_dlopen();
    return function ? function(file, mode) : NULL;
}

static int info_of(const void *handle, int request, void *argument) {
    static _Atomic(void *) cached;
    int (*function)(void *, int, void *) = (int (*)(void *, int, void *))vgpu_linker_function(&cached, "dlinfo");
    return function && handle ? function((void *)handle, request, argument) : -1;
}

/* The folders in which glibc would look for this object's libraries, without its cache (dlinfo(3)); NULL: unknown. The
 * caller frees the result. */
static Dl_serinfo *folders_of(const struct link_map *object) {
    Dl_serinfo size;
    if (info_of(object, RTLD_DI_SERINFOSIZE, &size) != 0)
        return NULL;
    Dl_serinfo *folders = malloc(size.dls_size);
    if (!folders)
        return NULL;
    folders->dls_size = size.dls_size;
    folders->dls_cnt = size.dls_cnt;
    if (info_of(object, RTLD_DI_SERINFO, folders) == 0)
        return folders;
    free(folders);
    return NULL;
}

static bool lists(const Dl_serinfo *folders, const char *name) {
    for (unsigned i = 0; folders && i < folders->dls_cnt; i++)
        if (strcmp(folders->dls_serpath[i].dls_name, name) == 0)
            return true;
    return false;
}

static void *open_in(const char *folder, const char *file, int mode) {
    char *path;
    void *handle = NULL;
    if (asprintf(&path, "%s/%s", folder, file) < 0)
        return NULL;
    if (access(path, F_OK) == 0)
        handle = real_open(path, mode);
    free(path);
    return handle;
}

/* A name without a folder. Searches up to the last folder that only the caller has; the other folders and the cache are
 * the same for this library. */
static void *open_searched(const struct link_map *caller, const char *file, int mode) {
    bool searches;
    void *handle = NULL;
    Dl_serinfo *folders = folders_of(caller),
               *own = folders_of(vgpu_loaded_object((const void *)open_searched, &searches));
    unsigned end = folders && own ? folders->dls_cnt : 0;
    while (end && lists(own, folders->dls_serpath[end - 1].dls_name))
        end--;
    for (unsigned i = 0; i < end && !handle; i++)
        handle = open_in(folders->dls_serpath[i].dls_name, file, mode);
    free(folders);
    free(own);
    return handle ? handle : real_open(file, mode);
}

/* A name that begins with $ORIGIN or ${ORIGIN}: the caller's folder. */
static bool open_beside(const struct link_map *caller, const char *file, int mode, void **handle) {
    const char *rest = strncmp(file, "$ORIGIN/", 8) == 0      ? file + 8
                       : strncmp(file, "${ORIGIN}/", 10) == 0 ? file + 10
                                                              : NULL;
    char *origin, *path = NULL;
    bool done = false;
    if (!rest || strchr(rest, '$') || !(origin = malloc(PATH_MAX)))
        return false;
    if (info_of(caller, RTLD_DI_ORIGIN, origin) == 0 && asprintf(&path, "%s/%s", origin, rest) >= 0) {
        *handle = real_open(path, mode);
        done = true;
        free(path);
    }
    free(origin);
    return done;
}

static bool open_as(const void *caller, const char *file, int mode, void **handle) {
    bool searches;
    if (strchr(file, '$'))
        return open_beside(vgpu_loaded_object(caller, &searches), file, mode, handle);
    const struct link_map *object = strchr(file, '/') ? NULL : vgpu_loaded_object(caller, &searches);
    *handle = object && searches && !vgpu_loaded_as(file) ? open_searched(object, file, mode) : real_open(file, mode);
    return true;
}

/* A tool that the user lets the driver open (CUDA_INJECTION64_PATH, as profilers do) counts as part of the program. */
static bool is_injected(const char *file) {
    const char *tool = getenv("CUDA_INJECTION64_PATH");
    return tool && strcmp(tool, file) == 0;
}

bool vgpu_open_for(const void *caller, const char *file, int mode, void **handle) {
    if (mode & RTLD_NOLOAD || !vgpu_loaded_is_driver(caller) || is_injected(file))
        return open_as(caller, file, mode, handle);
    const struct link_map *before = vgpu_loaded_driver_opens();
    /* it must stay loaded: its address range identifies it */
    const bool done = open_as(caller, file, mode | RTLD_NODELETE, handle);
    vgpu_loaded_driver_opened(before, done ? *handle : NULL);
    return done;
}
