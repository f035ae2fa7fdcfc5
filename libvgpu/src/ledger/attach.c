/* Finds and maps the region of this process. */
#define _GNU_SOURCE
#include "ledger/attach.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ledger/environment.h"
#include "ledger/region_mount.h"
#include "region/device_files.h"
#include "region/region_files.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* Where `vgpu run --strict` mounts the region, for programs that have lost their environment:
 * vgpu/workstation/enclosure.py.
 */
#define ENCLOSED_DIR "/etc/vgpu-slice"

/* These variables survive a fork, unlike struct vgpu_local, because the mappings survive, too. The thread that sets up
 * writes them once, under the set-up lock, before `decided`. */
struct vgpu_mapping vgpu_mapped = {.lock_fd = -1};
static enum vgpu_mode decided_mode;
static _Atomic bool decided;
/* how the attaching process joined; a child makes the child's file description from this member */
static struct vgpu_member first_member;
static char usage_path[4096];
static char note[512];

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(note, sizeof note, format, arguments);
    va_end(arguments);
}

static const char *reason(int error) {
    switch (error) {
    case -EPROTO: return "not a region of this version and this boot";
    case -ENOENT: return "missing";
    case -EACCES: return "permission denied";
    default: return strerror(-error);
    }
}

/* Errors that may have passed at the next call. */
static bool passes(int error) {
    return error == -EMFILE || error == -ENFILE || error == -ENOMEM;
}

__attribute__((constructor)) static void look_at_load(void) {
    vgpu_device_files_mark();
}

/* Maps both files of `dir`. *missing: there is no region. *passing: an error that may pass, so ask again. */
static bool map_region(const char *dir, bool *missing, bool *passing) {
    /* static: too large for the stack of some threads, and only the thread that sets up uses this path */
    static char limits_path[4096];
    struct vgpu_limits_file *limits;
    struct vgpu_usage_file *usage;
    int limits_fd, usage_fd;
    *missing = *passing = false;
    int result = vgpu_path_join(limits_path, sizeof limits_path, dir, "limits");
    if (result == 0)
        result = vgpu_path_join(usage_path, sizeof usage_path, dir, "usage");
    if (result == 0)
        result = vgpu_limits_map(limits_path, false, &limits, &limits_fd);
    if (result < 0) {
        *missing = result == -ENOENT || result == -ENOTDIR;
        *passing = passes(result);
        say("%s/limits: %s", dir, reason(result));
        return false;
    }
    close(limits_fd);
    if (realpath(usage_path, limits_path)) /* an absolute path, because the file may be opened again after a chdir */
        memcpy(usage_path, limits_path, sizeof usage_path);
    result = vgpu_usage_map(usage_path, true, &usage, &usage_fd);
    if (result == 0) {
        result = vgpu_member_join(&first_member, usage, usage_path, usage_fd);
        if (result < 0) {
            munmap(usage, sizeof *usage);
            close(usage_fd);
        }
    }
    if (result < 0) {
        munmap(limits, sizeof *limits);
        *passing = passes(result);
        say("%s/usage: %s", dir, reason(result));
        return false;
    }
    vgpu_member_disown(&first_member);
    vgpu_mapped.limits = limits;
    vgpu_mapped.usage = usage;
    vgpu_mapped.lock_fd = usage_fd;
    note[0] = 0;
    return true;
}

/* Makes the same structures in private memory. The kernel empties the accounts in a forked child, which starts with no
 * charges. */
static bool map_private(const struct vgpu_limits *from) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    struct vgpu_limits_file *limits = mmap(NULL, sizeof *limits, PROT_READ | PROT_WRITE, flags, -1, 0);
    struct vgpu_usage_file *usage = mmap(NULL, sizeof *usage, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (limits == MAP_FAILED || usage == MAP_FAILED) {
        say("no memory for the accounts");
        return false;
    }
    madvise(usage, sizeof *usage, MADV_WIPEONFORK);
    vgpu_limits_init(limits, from);
    vgpu_member_join(&first_member, usage, NULL, -1);
    vgpu_mapped.limits = limits;
    vgpu_mapped.usage = usage;
    return true;
}

/* A region made from an environment outlives that environment. If this process has other limits in its environment, the
 * log says that the region's limits hold. */
static void tell_other_limits(const char *dir) {
    /* static: too large for the stack of some threads, and only the thread that sets up uses these structures */
    static struct vgpu_limits here, asked;
    char ignored[256];
    vgpu_limits_snapshot(vgpu_mapped.limits, &here);
    if (here.cards[0].uuid[0] || vgpu_environment_limits(&asked, ignored, sizeof ignored) <= 0)
        return; /* an agent or `vgpu run` has made the region; its environment variables only inform */
    for (unsigned card = 0; card < here.card_count && card < asked.card_count; card++) {
        if (here.cards[card].memory != asked.cards[card].memory) {
            say("VGPU_DIR=%.200s: its limits hold, which were made earlier, and not those of the environment: card %u "
                "has %llu bytes, not %llu; "
                "a new folder takes the new ones",
                dir, card, (unsigned long long)here.cards[card].memory, (unsigned long long)asked.cards[card].memory);
            return;
        }
        if (here.cards[card].cores != asked.cards[card].cores) {
            say("VGPU_DIR=%.200s: its limits hold, which were made earlier, and not those of the environment: card %u "
                "has %u %% of its time, not %u %%; "
                "a new folder takes the new ones",
                dir, card, here.cards[card].cores, asked.cards[card].cores);
            return;
        }
    }
    if ((here.flags ^ asked.flags) & VGPU_OVERSUBSCRIBE)
        say("VGPU_DIR=%.200s: its limits hold, which were made earlier: CUDA_OVERSUBSCRIBE counts as %s; a new folder "
            "takes the new ones",
            dir, here.flags & VGPU_OVERSUBSCRIBE ? "true" : "false");
}

/* *passing: the error may be gone at the next call. */
static enum vgpu_mode decide(bool *passing) {
    /* static: too large for the stack of some threads, and only the thread that sets up uses this structure */
    static struct vgpu_limits limits;
    char from_environment[256];
    bool missing;

    vgpu_mapped.managed = true;
    if (map_region(VGPU_MANAGED_DIR, &missing, passing))
        return VGPU_REGION;
    if (!missing)
        return VGPU_BROKEN;
    if (vgpu_region_elsewhere(passing)) {
        say(*passing ? "%s: no descriptors or memory to see whether there is a region"
                     : "%s: this container's region is hidden or has been moved",
            VGPU_MANAGED_DIR);
        return VGPU_BROKEN;
    }
    vgpu_mapped.managed = false;
    if (map_region(ENCLOSED_DIR, &missing, passing))
        return VGPU_REGION;
    if (!missing || access(ENCLOSED_DIR, F_OK) == 0) /* mounted, but its files were removed */
        return VGPU_BROKEN;
    note[0] = 0;

    const char *dir = secure_getenv("VGPU_DIR");
    const bool has_dir = dir && *dir;
    if (has_dir && map_region(dir, &missing, passing)) {
        tell_other_limits(dir);
        return VGPU_REGION; /* if both exist, the region wins */
    }
    if (*passing)
        return VGPU_BROKEN;
    const int limited = vgpu_environment_limits(&limits, from_environment, sizeof from_environment);
    if (limited < 0) {
        say("%s", from_environment);
        return VGPU_BROKEN;
    }
    if (has_dir && missing && limited) {
        const int result = vgpu_region_files_make(dir, &limits, false);
        if ((result == 0 || result == -EEXIST) && map_region(dir, &missing, passing))
            return VGPU_REGION;
        if (result < 0 && result != -EEXIST)
            say("VGPU_DIR=%.200s: no region is there, and none can be made: %s", dir,
                access(dir, F_OK) == 0 ? reason(result) : "the folder is gone");
    }
    /* A region exists but cannot be read, or existed, and other processes may still hold it. Then this process must be
     * neither unlimited nor limited by itself. */
    if (has_dir && (limited || !missing || access(dir, F_OK) != 0)) {
        if (missing && !limited)
            say("VGPU_DIR=%.200s: the folder is gone", dir);
        return VGPU_BROKEN;
    }
    if (limited)
        return map_private(&limits) ? VGPU_PRIVATE : VGPU_BROKEN;
    note[0] = 0;
    return VGPU_UNLIMITED;
}

/* A forked child keeps its parent's mappings, with an open file description of its own. */
static enum vgpu_mode join(struct vgpu_local *local) {
    local->member.slot = VGPU_NO_SLOT;
    switch (decided_mode) {
    case VGPU_REGION: {
        const int result = vgpu_member_rejoin(&local->member, &first_member);
        if (result == 0)
            return VGPU_REGION;
        say("%s: %s", usage_path, reason(result));
        return VGPU_BROKEN;
    }
    case VGPU_PRIVATE: local->member = first_member; return VGPU_PRIVATE;
    default: return decided_mode;
    }
}

enum vgpu_mode vgpu_attach_slowly(struct vgpu_local *local) {
    if (!local)
        return VGPU_BROKEN;
    const int saved = errno;
    vgpu_lock_take(&local->setting_up);
    uint32_t attached = atomic_load_explicit(&local->attached, memory_order_acquire);
    if (attached == 0) {
        enum vgpu_mode mode;
        if (!atomic_load_explicit(&decided, memory_order_acquire)) {
            bool passing;
            mode = decided_mode = decide(&passing);
            if (passing) {
                vgpu_lock_release(&local->setting_up);
                errno = saved;
                return mode;
            }
            local->member = first_member;
            atomic_store_explicit(&decided, true, memory_order_release);
        } else {
            mode = join(local);
        }
        attached = (uint32_t)mode + 1;
        atomic_store_explicit(&local->attached, attached, memory_order_release);
    }
    vgpu_lock_release(&local->setting_up);
    errno = saved;
    return (enum vgpu_mode)(attached - 1);
}

enum vgpu_mode vgpu_attach(void) {
    enum vgpu_mode mode;
    vgpu_attached(&mode);
    return mode;
}

const struct vgpu_mapping *vgpu_mapping(void) {
    vgpu_attach();
    return &vgpu_mapped;
}

const char *vgpu_attach_note(void) {
    vgpu_attach();
    return note;
}
