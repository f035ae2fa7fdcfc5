/* The two files of a region: making, checking and mapping them, and the protocol by which limits change. */
#ifndef VGPU_REGION_FILES_H
#define VGPU_REGION_FILES_H
#include <stdbool.h>
#include <stddef.h>

#include "vgpu/region.h"

/* Makes DIR/usage, then DIR/limits; of several that try at the same time one wins. 0, -EEXIST (limits are there),
 * -EINVAL, or what the file system says. fixed_modes: 0644 and 0666 whatever the umask; else less the umask. */
int vgpu_region_files_make(const char *dir, const struct vgpu_limits *limits, bool fixed_modes);

/* Map a file and check that it is one of this ABI and this boot. *fd is the caller's to close. Errors: -ENOENT,
 * -EPROTO, -EACCES ... */
int vgpu_limits_map(const char *path, bool writable, struct vgpu_limits_file **out, int *fd);
int vgpu_usage_map(const char *path, bool writable, struct vgpu_usage_file **out, int *fd);

/* -EINVAL when no program could mean these limits: too many cards, an unterminated UUID, a share above 100, an unknown
 * policy or flag. */
int vgpu_limits_check(const struct vgpu_limits *limits);
/* Fills a file's first copy, before anybody can see it. */
void vgpu_limits_init(struct vgpu_limits_file *file, const struct vgpu_limits *limits);
/* Writes the copy that nobody reads, then turns the selector by one store. One writer at a time. */
void vgpu_limits_publish(struct vgpu_limits_file *file, const struct vgpu_limits *limits);
/* One whole set of limits; returns the selector that it belongs to. */
uint64_t vgpu_limits_snapshot(const struct vgpu_limits_file *file, struct vgpu_limits *out);

/* Gives a part of a file room on its file system, so that touching it in a mapping cannot fail: 0, -ENOSPC or -EDQUOT.
 */
int vgpu_file_back(int fd, size_t offset, size_t size);
/* The header says what it said when the file was mapped. Whoever empties the file or fills it with something else
 * writes over this, too. */
static inline bool vgpu_usage_intact(const struct vgpu_usage_file *usage) {
    const volatile struct vgpu_file_header *header = &usage->header;
    return header->magic == VGPU_USAGE_MAGIC && header->abi == VGPU_REGION_ABI && header->size == sizeof *usage;
}

/* DIR/NAME, or -ENAMETOOLONG. */
int vgpu_path_join(char *out, size_t size, const char *dir, const char *name);
#endif
