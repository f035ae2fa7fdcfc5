/* What the dynamic linker has loaded, read from its own lists and hash tables. Usable inside dlsym, where allocation is
 * forbidden. */
#ifndef VGPU_LOADED_H
#define VGPU_LOADED_H
#include <stdbool.h>

/* Address of the default version of `name` in the loaded object with this DT_SONAME; NULL: none. No locks, no
 * memory. */
void *vgpu_loaded_symbol(const char *soname, const char *name);

/* True if an object with this DT_SONAME is loaded. No locks, no memory. */
bool vgpu_loaded_as(const char *soname);

/* The first definition of `name` after the object that contains `caller`, in load order; NULL: none. */
void *vgpu_loaded_next(const void *caller, const char *name);

/* True if the object that contains `address` was loaded before the one that contains `other`. */
bool vgpu_loaded_is_before(const void *address, const void *other);

struct link_map;

/* True if `address` lies inside a loaded driver library: an object whose DT_SONAME or file name is libcuda.so* or
 * libnvidia-ml.so*. An object that such a library needs, or that the driver has opened, also counts. */
bool vgpu_loaded_in_driver(const void *address);
/* The same for a calling object: objects that were at this address and were unloaded do not count. */
bool vgpu_loaded_is_driver(const void *caller);

/* Around an open for the driver, on one thread. `handle`: the opened library, which then stays; NULL: none. */
const struct link_map *vgpu_loaded_driver_opens(void);
void vgpu_loaded_driver_opened(const struct link_map *before, void *handle);

/* The object that contains `address`, which glibc also takes as a handle; NULL: none. `searches`: the object says where
 * its libraries are. */
const struct link_map *vgpu_loaded_object(const void *address, bool *searches);

/* True if `address` lies inside the library that holds the real dlsym: libc.so.6, or libdl.so.2 before glibc 2.34. */
bool vgpu_loaded_in_libc(const void *address);
#endif
