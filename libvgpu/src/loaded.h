/* What the dynamic linker has loaded, read from its own lists and hash tables: usable from inside dlsym, where nothing may allocate. */
#ifndef VGPU_LOADED_H
#define VGPU_LOADED_H
#include <stdbool.h>

/* Address of the default version of `name` in the loaded object with this DT_SONAME; NULL if there is none. No locks, no memory. */
void *vgpu_loaded_symbol(const char *soname, const char *name);

/* The first definition of `name` behind the object that contains `caller`, in load order; NULL if there is none. */
void *vgpu_loaded_next(const void *caller, const char *name);

/* True if `address` lies inside a loaded driver library: an object whose DT_SONAME or file name is libcuda.so* or libnvidia-ml.so*. */
bool vgpu_loaded_in_driver(const void *address);

/* True if `address` lies inside the library that holds the real dlsym: libc.so.6, or libdl.so.2 before glibc 2.34. */
bool vgpu_loaded_in_libc(const void *address);
#endif
