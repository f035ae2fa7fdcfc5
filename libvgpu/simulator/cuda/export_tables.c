/* cuGetExportTable: tables of functions that NVIDIA does not document, but that the CUDA runtime needs to start.
 *
 * The meaning of a slot comes from two sources, named at each slot. One is ZLUDA (github.com/vosen/ZLUDA,
 * dark_api/src/lib.rs), which replaces the driver. The other ("seen") is what the runtimes 11.8, 12.1, 12.4, 12.9, 13.0
 * and 13.5 and cuBLAS ask of this simulator. A table begins with its size in bytes, except the table of storage.c.
 * Slots of unknown meaning return CUDA_ERROR_NOT_SUPPORTED; no runtime calls one. */
#include <string.h>

#include "cuda/driver.h"
#include "cuda/export_tables.h"

#define SIZE(table) ((void *)sizeof(table))

static CUresult unknown(void) {
    return driver_ready() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NOT_INITIALIZED;
}

/* The runtime's own table ("CudartInterface"). */

/* Neither activates nor retains the context. At its start the runtime asks for every device and compares with
 * cuCtxGetCurrent. It makes the handle current before it retains the context. */
static CUresult primary_context(CUcontext *out, CUdevice device) {
    CUresult result = device_check(device);
    if (result || !out)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *out = context_primary(device);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult load_wrapper(CUmodule *out, const void *wrapper, const void *a, const void *b, unsigned c) {
    return a || b || c ? CUDA_ERROR_NOT_SUPPORTED : cuModuleLoadFatBinary(out, wrapper);
}

static CUresult load_fatbin(const void *fatbin, CUmodule *out, const void *a, const void *b, unsigned c) {
    return load_wrapper(out, fatbin, a, b, c);
}

static void unregister_wrapper(const void *wrapper) {
    (void)wrapper; /* its modules are unloaded by cuModuleUnload, or with their contexts */
}

static CUresult load_compilers(void) {
    return CUDA_SUCCESS;
}

const void *const runtime_table[13] = {
    [0] = SIZE(runtime_table),
    [1] = (void *)cuModuleLoadFatBinary, /* takes a wrapper; ZLUDA; no seen runtime calls it */
    [2] = (void *)primary_context,       /* ZLUDA; seen: once for each device */
    [3 ... 5] = (void *)unknown,         /* unknown, never called */
    [6] = (void *)load_wrapper,          /* ZLUDA; seen: 11.8, which has no cuLibraryLoadData */
    [7] = (void *)unregister_wrapper,    /* ZLUDA; seen: 11.8, at exit, with the wrapper that [6] had */
    [8] = (void *)load_fatbin,           /* ZLUDA: as [6] for a fatbin without wrapper; not called */
    [9 ... 11] = (void *)unknown,        /* unknown, never called */
    [12] = (void *)load_compilers,       /* ZLUDA: loads the PTX compilers; seen: 13.5, once, at the first module */
};

/* The runtime reads here which of its calls an attached tool wants to be notified of ("ToolsRuntimeCallbackHooks"):
 * none. */

static uint32_t callbacks[1024], domains[14];

static void callbacks_wanted(void **out, size_t *count) {
    *out = callbacks;
    *count = sizeof callbacks / sizeof *callbacks;
}

static void domains_wanted(void **out, size_t *count) {
    *out = domains;
    *count = sizeof domains / sizeof *domains;
}

static const void *const hooks_table[7] = {
    [0] = SIZE(hooks_table),        [1] = (void *)unknown, /* notifies an attached tool; never called without one */
    [2] = (void *)callbacks_wanted,                        /* ZLUDA; seen: once, at the start */
    [3 ... 5] = (void *)unknown,                           /* [4] notifies an attached tool; never called without one */
    [6] = (void *)domains_wanted,                          /* ZLUDA; seen: once, at the start */
};

/* Queries of tools about threads ("ToolsTls"). */
static const void *const thread_table[4] = {
    [0] = SIZE(thread_table),
    [1] = (void *)unknown,         /* unknown, never called */
    [2] = (void *)cuCtxGetCurrent, /* ZLUDA: this thread's current context; seen: cuBLAS */
    [3] = (void *)unknown,         /* unknown, never called */
};

/* Queries of tools about contexts ("ToolsContext"). The runtime 13.5 calls none of them, but does not start without the
 * table. */

static CUresult device_of(CUcontext context, CUdevice *out) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(context, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = context->device;
    return CUDA_SUCCESS;
}

static const void *const context_table[95] = {
    [0] = SIZE(context_table),    [1 ... 2] = (void *)unknown, /* unknown, never called */
    [3] = (void *)device_of,                                   /* ZLUDA; seen: cuBLAS */
    [4] = (void *)cuCtxGetId,                                  /* ZLUDA; seen: cuBLAS */
    [5 ... 94] = (void *)unknown,                              /* unknown, never called */
};

/* Checks of contexts: every context passes. */

/* The driver leaves *unwrapped unchanged: ZLUDA has seen this on hardware. */
static CUresult context_check(CUcontext context, unsigned *flags, const void **unwrapped) {
    (void)context, (void)unwrapped;
    if (flags)
        *flags = 0;
    return CUDA_SUCCESS;
}

static unsigned check_mode(void) {
    return 0;
}

static const void *const checks_table[15] = {
    [0] = SIZE(checks_table),     [1] = (void *)unknown, /* unknown, never called */
    [2] = (void *)context_check,                         /* ZLUDA; seen: 12.4 and newer, at each new context */
    [3] = (void *)check_mode,                            /* ZLUDA; seen: 12.4 and newer, once, at the start */
    [4 ... 14] = (void *)unknown,                        /* unknown, never called */
};

/* The runtimes 12.9 and newer also ask for the id f8cff951-2146-8b4e-b9e2-fb469e7c0dd9, before cuInit. They start
 * without that table, and nothing is known about it. */
static const struct table {
    uint8_t id[16];
    const void *const *slots;
} tables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9}, runtime_table},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66}, hooks_table},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc}, thread_table},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93}, storage_table},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e}, checks_table},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2}, context_table},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2},
     runtime_check_table},
};

CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    INJECT();
    if (!table || !id)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (tables[i].slots && memcmp(id->bytes, tables[i].id, sizeof tables[i].id) == 0)
            *table = (const void *)tables[i].slots;
    return *table ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
