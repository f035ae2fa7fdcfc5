/* The dynamic linker's own dlsym and friends, found without calling dlsym. */
#ifndef VGPU_LOADER_H
#define VGPU_LOADER_H
#include <stdatomic.h>

void *vgpu_real_dlsym(void *handle, const char *symbol);
/* dlopen and dlerror of the C library (libdl before glibc 2.34); NULL: the process has none. */
void *vgpu_real_dlopen(const char *file, int mode);
/* Cached address of a dynamic linker function: from libc.so.6 since glibc 2.34, from libdl.so.2 before. NULL: the
 * process has none. */
void *vgpu_linker_function(_Atomic(void *) *cache, const char *name);
void *vgpu_linker_dlopen(void);
#endif
