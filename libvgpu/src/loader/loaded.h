/* What the dynamic linker has loaded, read from its own lists and hash tables: usable from inside dlsym, where nothing
 * may allocate. */
#ifndef VGPU_LOADED_H
#define VGPU_LOADED_H
#include <stdbool.h>

/* Address of the default version of `name` in the loaded object with this DT_SONAME; NULL if there is none. No locks,
 * no memory. */
void *vgpu_loaded_symbol(const char *soname, const char *name);

/* True if an object with this DT_SONAME is loaded. No locks, no memory. */
bool vgpu_loaded_as(const char *soname);

/* The first definition of `name` behind the object that contains `caller`, in load order; NULL if there is none. */
void *vgpu_loaded_next(const void *caller, const char *name);

/* True if the object that contains `address` was loaded before the one that contains `other`. */
bool vgpu_loaded_is_before(const void *address, const void *other);

struct link_map;

/* True if `address` lies inside a loaded driver library: an object whose DT_SONAME or file name is libcuda.so* or
 * libnvidia-ml.so*, one that such an object needs, or one that the driver has opened. */
bool vgpu_loaded_in_driver(const void *address);
/* The same about somebody who asks: what lay there once and was unloaded does not count. */
bool vgpu_loaded_is_driver(const void *caller);

/* Around an open that the driver asks for, on one thread. `handle`: what was opened, so that it stays; NULL: nothing.
 */
const struct link_map *vgpu_loaded_driver_opens(void);
void vgpu_loaded_driver_opened(const struct link_map *before, void *handle);

/* The object that contains `address`, which glibc takes as a handle, too; NULL: none. `searches`: it says itself where
 * its libraries lie. */
const struct link_map *vgpu_loaded_object(const void *address, bool *searches);

/* True if `address` lies inside the library that holds the real dlsym: libc.so.6, or libdl.so.2 before glibc 2.34. */
bool vgpu_loaded_in_libc(const void *address);
#endif
