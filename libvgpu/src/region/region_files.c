/* Creates, checks and maps the two files of a region. */
#define _GNU_SOURCE
#include "region/region_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "region/death.h"

#define PATH_ROOM 4096

/* Limits are copied word by word: another process may read while the agent writes. */
typedef uint64_t __attribute__((may_alias)) word_t;
#define LIMITS_WORDS (sizeof(struct vgpu_limits) / sizeof(word_t))

/* Identifies this boot: a region on a disk outlives a reboot, and must not count as alive then. */
static void read_boot_id(char out[static 40]) {
    memset(out, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t length = read(fd, out, 39);
    close(fd);
    out[length > 0 ? strcspn(out, "\n") : 0] = 0;
}

static struct vgpu_file_header header_for(uint64_t magic, size_t size) {
    struct vgpu_file_header header = {.magic = magic, .abi = VGPU_REGION_ABI, .size = (uint32_t)size};
    read_boot_id(header.boot_id);
    return header;
}

int vgpu_path_join(char *out, size_t size, const char *dir, const char *name) {
    const int length = snprintf(out, size, "%s/%s", dir, name);
    return length < 0 || (size_t)length >= size ? -ENAMETOOLONG : 0;
}

static int write_all(int fd, const void *data, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t wrote = pwrite(fd, (const char *)data + done, size - done, (off_t)done);
        if (wrote < 0 && errno != EINTR)
            return -errno;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    return 0;
}

int vgpu_file_back(int fd, size_t offset, size_t size) {
    while (fallocate(fd, FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size) != 0)
        if (errno == ENOSPC || errno == EDQUOT)
            return -errno;
        else if (errno != EINTR)
            return 0; /* the file system cannot allocate space in advance */
    return 0;
}

/* Makes a new file of `size` bytes that begins with `data`, under a unique name. After the first `backed` bytes the
 * file is a hole. */
static int make_temporary(char *path, size_t path_size, const char *dir, const char *name, const void *data,
                          size_t data_size, size_t size, size_t backed, mode_t mode, bool fixed_mode) {
    int fd = -1;
    for (int attempt = 0; fd < 0; attempt++) {
        struct timespec now;
        char unique[64];
        clock_gettime(CLOCK_REALTIME, &now);
        snprintf(unique, sizeof unique, ".%s.%d.%lx%09lx", name, (int)getpid(), (unsigned long)now.tv_sec,
                 (unsigned long)now.tv_nsec);
        int result = vgpu_path_join(path, path_size, dir, unique);
        if (result < 0)
            return result;
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
        if (fd < 0 && (errno != EEXIST || attempt == 100))
            return -errno;
    }
    int result = 0;
    if (fixed_mode && fchmod(fd, mode) != 0)
        result = -errno;
    if (result == 0)
        result = write_all(fd, data, data_size);
    if (result == 0 && ftruncate(fd, (off_t)size) != 0)
        result = -errno;
    if (result == 0)
        result = vgpu_file_back(fd, 0, backed);
    close(fd);
    if (result < 0)
        unlink(path);
    return result;
}

/* Uses link, not rename: rename would replace a file that other processes already use, and each of the two files would
 * grant the whole limit. */
static int publish_file(const char *temporary, const char *dir, const char *name) {
    char *path = malloc(PATH_ROOM);
    int result = path ? vgpu_path_join(path, PATH_ROOM, dir, name) : -ENOMEM;
    DEATH_POINT();
    if (result == 0 && link(temporary, path) != 0)
        result = -errno;
    unlink(temporary);
    free(path);
    return result;
}

/* Too large for a thread's stack. */
struct making {
    char path[PATH_ROOM];
    struct vgpu_limits_file limits;
};

static int make_files(struct making *making, const char *dir, const struct vgpu_limits *limits, bool fixed_modes) {
    char *path = making->path;
    const struct vgpu_file_header usage_header = header_for(VGPU_USAGE_MAGIC, sizeof(struct vgpu_usage_file));
    int result = vgpu_limits_check(limits);
    if (result == 0)
        result = vgpu_path_join(path, PATH_ROOM, dir, "limits");
    if (result == 0 && access(path, F_OK) == 0)
        result = -EEXIST;
    if (result < 0)
        return result;
    making->limits.header = header_for(VGPU_LIMITS_MAGIC, sizeof making->limits);
    vgpu_limits_init(&making->limits, limits);

    result = make_temporary(path, PATH_ROOM, dir, "usage", &usage_header, sizeof usage_header,
                            sizeof(struct vgpu_usage_file), offsetof(struct vgpu_usage_file, slots), 0666, fixed_modes);
    if (result == 0)
        result = publish_file(path, dir, "usage");
    /* `usage` exists: another process is making the region, or died before it made `limits` */
    if (result < 0 && result != -EEXIST)
        return result;
    result = make_temporary(path, PATH_ROOM, dir, "limits", &making->limits, sizeof making->limits,
                            sizeof making->limits, sizeof making->limits, 0644, fixed_modes);
    return result < 0 ? result : publish_file(path, dir, "limits");
}

int vgpu_region_files_make(const char *dir, const struct vgpu_limits *limits, bool fixed_modes) {
    struct making *making = calloc(1, sizeof *making);
    const int result = making ? make_files(making, dir, limits, fixed_modes) : -ENOMEM;
    free(making);
    return result;
}

static int map_file(const char *path, uint64_t magic, size_t size, bool writable, void **out, int *fd) {
    struct stat status;
    struct vgpu_file_header expected = header_for(magic, size);
    *fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (*fd < 0)
        return -errno;
    int result = 0;
    void *address = MAP_FAILED;
    if (fstat(*fd, &status) != 0)
        result = -errno;
    else if (!S_ISREG(status.st_mode) || status.st_size != (off_t)size)
        result = -EPROTO;
    else {
        address = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, *fd, 0);
        if (address == MAP_FAILED)
            result = -errno;
    }
    if (result == 0) {
        const struct vgpu_file_header *header = address;
        const bool boot_known = expected.boot_id[0] != 0;
        if (header->magic != magic || header->abi != VGPU_REGION_ABI || header->size != size ||
            (boot_known && memcmp(header->boot_id, expected.boot_id, sizeof header->boot_id) != 0))
            result = -EPROTO;
    }
    if (result < 0) {
        if (address != MAP_FAILED)
            munmap(address, size);
        close(*fd);
        *fd = -1;
        return result;
    }
    *out = address;
    return 0;
}

int vgpu_limits_map(const char *path, bool writable, struct vgpu_limits_file **out, int *fd) {
    return map_file(path, VGPU_LIMITS_MAGIC, sizeof **out, writable, (void **)out, fd);
}

int vgpu_usage_map(const char *path, bool writable, struct vgpu_usage_file **out, int *fd) {
    return map_file(path, VGPU_USAGE_MAGIC, sizeof **out, writable, (void **)out, fd);
}

int vgpu_limits_check(const struct vgpu_limits *limits) {
    const bool burst_allowed = limits->burst_ms == 0 || (limits->burst_ms >= 20 && limits->burst_ms <= 100);
    if (limits->card_count > VGPU_MAX_CARDS || limits->core_policy > VGPU_CORES_NONE || !burst_allowed ||
        limits->flags & ~(uint32_t)(VGPU_ALLOW_DISABLE_CONTROL | VGPU_OVERSUBSCRIBE | VGPU_KILL_ON_OOM | VGPU_MOVABLE |
                                    VGPU_FILLS_ON_ENGINE | VGPU_COPIES_ON_SMS) ||
        (limits->flags & VGPU_MOVABLE && !(limits->flags & VGPU_OVERSUBSCRIBE)))
        return -EINVAL;
    for (uint32_t card = 0; card < limits->card_count; card++) {
        const struct vgpu_card_limit *limit = &limits->cards[card];
        if (!memchr(limit->uuid, 0, sizeof limit->uuid) || limit->cores > 100 || limit->cores_ceiling > 100)
            return -EINVAL;
    }
    return 0;
}

void vgpu_limits_init(struct vgpu_limits_file *file, const struct vgpu_limits *limits) {
    file->copies[0] = *limits;
    atomic_store_explicit(&file->selector, 0, memory_order_release);
}

void vgpu_limits_publish(struct vgpu_limits_file *file, const struct vgpu_limits *limits) {
    const uint64_t next = atomic_load(&file->selector) + 1;
    struct vgpu_limits *copy = &file->copies[next & 1];
    /* Readers may still read this copy from two changes ago. They check the selector after reading, so they must see
     * the selector change before the copy changes. */
    atomic_thread_fence(memory_order_seq_cst);
    for (size_t i = 0; i < LIMITS_WORDS; i++) {
        __atomic_store_n((word_t *)copy + i, ((const word_t *)limits)[i], __ATOMIC_RELAXED);
        DEATH_POINT();
    }
    atomic_store_explicit(&file->selector, next, memory_order_release);
    DEATH_POINT();
}

uint64_t vgpu_limits_snapshot(const struct vgpu_limits_file *file, struct vgpu_limits *out) {
    for (;;) {
        const uint64_t selector = atomic_load_explicit(&file->selector, memory_order_acquire);
        const struct vgpu_limits *copy = &file->copies[selector & 1];
        for (size_t i = 0; i < LIMITS_WORDS; i++)
            ((word_t *)out)[i] = __atomic_load_n((const word_t *)copy + i, __ATOMIC_RELAXED);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&file->selector, memory_order_relaxed) == selector)
            return selector;
    }
}
