/* Contents that other processes also map: private pages become pages of a file, at the same address. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/driver.h"

#define PAGE 4096u
#define BATCH 512u

int shared_memory_file(const char *name) {
    return (int)syscall(SYS_memfd_create, name, 1u /* MFD_CLOEXEC */); /* glibc has memfd_create only from 2.27 on */
}

char *shared_map(int fd, uint64_t offset, uint64_t size) {
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
    return map == MAP_FAILED ? NULL : map;
}

static bool write_page(int fd, uint64_t offset, const char *page, uint64_t size) {
    for (uint64_t done = 0; done < size;) {
        ssize_t step = pwrite(fd, page + done, size - done, (off_t)(offset + done));
        if (step <= 0)
            return false;
        done += (uint64_t)step;
    }
    return true;
}

/* Copies only written pages: reading the others would allocate memory. /proc/self/pagemap: bit 63 present, bit 62
 * swapped. */
static bool copy_written(int fd, uint64_t offset, const char *contents, uint64_t size) {
    int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    bool whole = true;
    for (uint64_t at = 0; at < size && whole; at += (uint64_t)BATCH * PAGE) {
        uint64_t state[BATCH], pages = (size - at + PAGE - 1) / PAGE;
        pages = pages < BATCH ? pages : BATCH;
        off_t entry = (off_t)(((uintptr_t)contents + at) / PAGE * sizeof *state);
        bool known = map >= 0 && pread(map, state, pages * sizeof *state, entry) == (ssize_t)(pages * sizeof *state);
        for (uint64_t i = 0; i < pages && whole; i++) {
            uint64_t start = at + i * PAGE, length = size - start < PAGE ? size - start : PAGE;
            if (!known || state[i] >> 62)
                whole = write_page(fd, offset + start, contents + start, length);
        }
    }
    if (map >= 0)
        close(map);
    return whole;
}

bool shared_move(int fd, uint64_t offset, char **contents, uint64_t size) {
    uint64_t end = offset + (size + PAGE - 1) / PAGE * PAGE;
    if (ftruncate(fd, (off_t)end) != 0)
        return false;
    if (!*contents)
        return (*contents = shared_map(fd, offset, size)) != NULL;
    if (!copy_written(fd, offset, *contents, size))
        return false;
    return mmap(*contents, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, (off_t)offset) !=
           MAP_FAILED;
}
