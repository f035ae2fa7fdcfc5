/* dlopen on behalf of another object: glibc looks for a file where the caller's RPATH, RUNPATH and place say, and takes
 * for the caller who calls. */
#ifndef VGPU_OPENING_H
#define VGPU_OPENING_H
#include <stdbool.h>

/* Opens `file` as `caller` would, and counts it to the driver where the caller is the driver. False: that cannot be
 * done (a name with $LIB or $PLATFORM in it), nothing was opened. `*handle` is NULL when the file cannot be opened;
 * dlerror then says why. */
bool vgpu_open_for(const void *caller, const char *file, int mode, void **handle);
#endif
