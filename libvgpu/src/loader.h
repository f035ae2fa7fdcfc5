/* The dynamic linker's own dlsym and friends, found without calling dlsym. */
#ifndef VGPU_LOADER_H
#define VGPU_LOADER_H

void *vgpu_real_dlsym(void *handle, const char *symbol);
/* dlopen and dlerror of the C library (libdl before glibc 2.34); NULL when the process has none. */
void *vgpu_real_dlopen(const char *file, int mode);
#endif
