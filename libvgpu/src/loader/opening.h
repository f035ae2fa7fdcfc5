/* dlopen for another object. glibc looks for a file by the RPATH, RUNPATH and folder of the caller, and takes the
 * calling code for the caller. */
#ifndef VGPU_OPENING_H
#define VGPU_OPENING_H
#include <stdbool.h>

/* Opens `file` as `caller` would; if the caller is the driver, the library counts as the driver's. False: not possible
 * (a name with $LIB or $PLATFORM), and nothing was opened. `*handle` is NULL if the file cannot be opened; dlerror then
 * says why. */
bool vgpu_open_for(const void *caller, const char *file, int mode, void **handle);
#endif
