/* The two files of a region: makes, checks and maps them, and defines how limits change. */
#ifndef VGPU_REGION_FILES_H
#define VGPU_REGION_FILES_H
#include <stdbool.h>
#include <stddef.h>

#include "vgpu/region.h"

/* Makes DIR/usage, then DIR/limits; of several processes that try at once, one wins. 0, -EEXIST (limits exist),
 * -EINVAL, or the file system's error. fixed_modes: exactly 0644 and 0666; else reduced by the umask. */
int vgpu_region_files_make(const char *dir, const struct vgpu_limits *limits, bool fixed_modes);

/* Maps a file and checks its ABI and boot. The caller closes *fd. Errors: -ENOENT, -EPROTO, -EACCES ... */
int vgpu_limits_map(const char *path, bool writable, struct vgpu_limits_file **out, int *fd);
int vgpu_usage_map(const char *path, bool writable, struct vgpu_usage_file **out, int *fd);

/* -EINVAL for impossible limits: too many cards, an unterminated UUID, a share above 100, an unknown policy or flag. */
int vgpu_limits_check(const struct vgpu_limits *limits);
/* Fills a file's first copy, before other processes can see the file. */
void vgpu_limits_init(struct vgpu_limits_file *file, const struct vgpu_limits *limits);
/* Writes the unused copy, then switches the selector by one store. One writer at a time. */
void vgpu_limits_publish(struct vgpu_limits_file *file, const struct vgpu_limits *limits);
/* Copies one whole set of limits; returns its selector. */
uint64_t vgpu_limits_snapshot(const struct vgpu_limits_file *file, struct vgpu_limits *out);

/* Allocates disk space for a part of a file, so that a write through a mapping cannot fail: 0, -ENOSPC or -EDQUOT. */
int vgpu_file_back(int fd, size_t offset, size_t size);
/* Whether the header is unchanged since the mapping. A program that empties or overwrites the file destroys the header,
 * too. */
static inline bool vgpu_usage_intact(const struct vgpu_usage_file *usage) {
    const volatile struct vgpu_file_header *header = &usage->header;
    return header->magic == VGPU_USAGE_MAGIC && header->abi == VGPU_REGION_ABI && header->size == sizeof *usage;
}

/* DIR/NAME, or -ENAMETOOLONG. */
int vgpu_path_join(char *out, size_t size, const char *dir, const char *name);
#endif
