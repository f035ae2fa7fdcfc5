/* A preloaded library with a dlsym of its own, as graphics overlays and tracers have: it asks the C library for the
 * real one. */
#define _GNU_SOURCE
#include <dlfcn.h>

void *dlsym(void *handle, const char *symbol) {
    static void *(*real)(void *, const char *);
    if (!real) {
        void *libc = dlopen("libc.so.6", RTLD_NOW);
        real = (void *(*)(void *, const char *))dlvsym(libc, "dlsym", "GLIBC_2.34");
        if (!real)
            real = (void *(*)(void *, const char *))dlvsym(libc, "dlsym", "GLIBC_2.2.5");
        if (!real)
            real = (void *(*)(void *, const char *))dlvsym(dlopen("libdl.so.2", RTLD_NOW), "dlsym", "GLIBC_2.2.5");
    }
    return real(handle, symbol);
}
