/* A libcuda.so.1 that only passes calls on, to functions that it looks up in another library when they are first
 * called, as compatibility packages do. BELOW: the other library's name. HOW: handle, versioned, next (it is linked
 * with the other one), standard (the default scope). FLAGS: of dlopen. EARLY: opens it as it is loaded itself. HELPER:
 * another object asks. TOOL: a library that it opens, too, at cuInit, as the driver opens a profiler's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#ifndef FLAGS
#define FLAGS 0
#endif

#ifdef HELPER
void *helped(void *handle, const char *name);
#elif defined(IS_HELPER)
__attribute__((visibility("default"))) void *helped(void *handle, const char *name) {
    return dlsym(handle, name);
}
#endif

#ifndef IS_HELPER
enum { handle, versioned, next, standard };

static void *below(void) {
    static void *opened;
    if (!opened && !(opened = dlopen(BELOW, RTLD_NOW | FLAGS))) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    return opened;
}

static void *find(const char *name) {
    void *found = NULL;
    switch (HOW) {
#ifdef HELPER
    case handle: found = helped(below(), name); break;
#else
    case handle: found = dlsym(below(), name); break;
#endif
    case versioned: found = dlvsym(below(), name, "ANY_1"); break;
    case next: found = dlsym(RTLD_NEXT, name); break;
    case standard:
        below();
        found = dlsym(RTLD_DEFAULT, name);
        break;
    }
    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        abort();
    }
    return found;
}

#ifdef EARLY
static long (*early)(long, long, long, long, long, long);
__attribute__((constructor)) static void begin(void) {
    *(void **)&early = find("cuInit");
}
#endif

typedef long call(long, long, long, long, long, long);
#define PASS(name)                                                                                                     \
    __attribute__((visibility("default"))) long name(long a, long b, long c, long d, long e, long f) {                 \
        static call *function;                                                                                         \
        if (!function)                                                                                                 \
            function = (call *)find(#name);                                                                            \
        return function(a, b, c, d, e, f);                                                                             \
    }
#ifdef EARLY
__attribute__((visibility("default"))) long cuInit(long a) {
    return early(a, 0, 0, 0, 0, 0);
}
#elif defined(TOOL)
__attribute__((visibility("default"))) long cuInit(long a) {
    return dlopen(TOOL, RTLD_NOW) ? ((call *)find("cuInit"))(a, 0, 0, 0, 0, 0) : 999;
}
#else
PASS(cuInit)
#endif
PASS(cuDeviceGet)
PASS(cuDeviceGetCount)
PASS(cuDeviceGetAttribute)
PASS(cuDeviceGetUuid_v2)
PASS(cuDeviceTotalMem_v2)
PASS(cuCtxCreate_v2)
PASS(cuCtxDestroy_v2)
PASS(cuCtxGetCurrent)
PASS(cuCtxSetCurrent)
PASS(cuCtxGetDevice)
PASS(cuDevicePrimaryCtxRetain)
PASS(cuDevicePrimaryCtxGetState)
PASS(cuDevicePrimaryCtxRelease_v2)
PASS(cuMemAlloc_v2)
PASS(cuMemFree_v2)
PASS(cuMemGetInfo_v2)
PASS(cuMemAllocPitch_v2)
PASS(cuGetProcAddress_v2)
#endif
