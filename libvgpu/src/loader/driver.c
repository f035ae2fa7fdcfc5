/* Loads the driver and keeps the table of its functions and their hooks. */
#define _GNU_SOURCE
#include "loader/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "base/address_table.h"
#include "loader/loaded.h"
#include "loader/loader.h"

#define NAME_SLOTS 1024 /* power of two, at most half full: see the assertion below */

enum stream_meaning { ANY, LEGACY, PER_THREAD };
enum library { LIBRARY_CUDA, LIBRARY_NVML, LIBRARIES };

struct hook {
    const char *name; /* the name for cuGetProcAddress; NULL: not a CUDA function */
    void *function;
    int version;
    enum stream_meaning stream;
};

static const char *const symbols[VGPU_ENTRY_COUNT] = {
#define CUDA_HOOK(name, symbol, version, stream) #symbol,
#define NVML_HOOK(symbol) #symbol,
#include "loader/hooks.def"
#undef CUDA_HOOK
#undef NVML_HOOK
#define CUDA_CALL(symbol) #symbol,
#define NVML_CALL(symbol) #symbol,
#include "loader/calls.def"
#undef CUDA_CALL
#undef NVML_CALL
};

static const struct hook hooks[VGPU_HOOK_COUNT] = {
#define CUDA_HOOK(name, symbol, version, stream) {#name, (void *)symbol, version, stream},
#define NVML_HOOK(symbol) {NULL, (void *)symbol, 0, ANY},
#include "loader/hooks.def"
#undef CUDA_HOOK
#undef NVML_HOOK
};

_Static_assert(VGPU_HOOK_COUNT * 2 <= NAME_SLOTS, "the table of names must stay half empty");

_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];

static uint32_t hash_of(const char *text) {
    uint32_t hash = 2166136261u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash;
}

/* Exact names, hashed at first use into a table that never changes afterwards. Threads that fill it at the same time
 * write the same values. */
static atomic_ushort name_table[NAME_SLOTS]; /* hook number + 1 */
static atomic_bool name_table_ready;

static void fill_name_table(void) {
    for (int i = 0; i < VGPU_HOOK_COUNT; i++) {
        uint32_t slot = hash_of(symbols[i]) % NAME_SLOTS;
        while (true) {
            unsigned short there = atomic_load(&name_table[slot]);
            if (there == i + 1 ||
                (there == 0 && atomic_compare_exchange_strong(&name_table[slot], &there, (unsigned short)(i + 1))))
                break;
            if (there == i + 1)
                break;
            slot = (slot + 1) % NAME_SLOTS;
        }
    }
    atomic_store_explicit(&name_table_ready, true, memory_order_release);
}

int vgpu_hook_number(const char *symbol) {
    if ((symbol[0] != 'c' || symbol[1] != 'u') && (symbol[0] != 'n' || symbol[1] != 'v'))
        return -1;
    if (!atomic_load_explicit(&name_table_ready, memory_order_acquire))
        fill_name_table();
    for (uint32_t slot = hash_of(symbol) % NAME_SLOTS;; slot = (slot + 1) % NAME_SLOTS) {
        unsigned short there = atomic_load_explicit(&name_table[slot], memory_order_relaxed);
        if (there == 0)
            return -1;
        if (strcmp(symbols[there - 1], symbol) == 0)
            return there - 1;
    }
}

bool vgpu_hook_base(const char *name) {
    for (int i = 0; i < VGPU_HOOK_COUNT; i++)
        if (hooks[i].name && strcmp(hooks[i].name, name) == 0)
            return true;
    return false;
}

void *vgpu_hook_function(int hook) {
    return hooks[hook].function;
}

void *vgpu_driver_hook_of(const void *address) {
    const int hook = vgpu_addresses_find((uintptr_t)address);
    return hook >= 0 ? hooks[hook].function : NULL;
}

/* Learns only the first address of a function. Functions of another copy of the driver are never returned to the
 * program. A program can load any number of copies, so remembering them would only take room. */
void vgpu_driver_learn(int hook, void *address) {
    void *known = NULL;
    if (atomic_compare_exchange_strong(&vgpu_driver_entries[hook], &known, address) || known == address)
        vgpu_addresses_put(hook, (uintptr_t)address);
}

static enum library library_of(int entry) {
    return symbols[entry][0] == 'c' ? LIBRARY_CUDA : LIBRARY_NVML;
}

/* The driver library of this process: the loaded one, else opened now. */
static void *library_handle(enum library library) {
    static const char *const sonames[LIBRARIES] = {"libcuda.so.1", "libnvidia-ml.so.1"};
    static _Atomic(void *) handles[LIBRARIES];
    void *handle = atomic_load_explicit(&handles[library], memory_order_acquire);
    if (!handle) {
        handle = vgpu_real_dlopen(sonames[library], RTLD_LAZY | RTLD_NOLOAD);
        if (!handle)
            handle = vgpu_real_dlopen(sonames[library], RTLD_LAZY);
        atomic_store_explicit(&handles[library], handle, memory_order_release);
    }
    return handle;
}

/* Looks up all functions of one library at once, so that later calls find theirs by one load. */
static void resolve(enum library library) {
    void *handle = library_handle(library);
    if (!handle)
        return;
    for (int i = 0; i < VGPU_ENTRY_COUNT; i++) {
        if (library_of(i) != library)
            continue;
        void *address = vgpu_real_dlsym(handle, symbols[i]);
        if (!vgpu_loaded_in_driver(address))
            /* a driver without this function, or this library's own export, found through the driver's dependencies */
            continue;
        if (i < VGPU_HOOK_COUNT) {
            vgpu_driver_learn(i, address);
        } else {
            void *none = NULL;
            atomic_compare_exchange_strong(&vgpu_driver_entries[i], &none, address);
        }
    }
}

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    static atomic_bool resolved[LIBRARIES];
    enum library library = library_of((int)entry);
    if (atomic_load(&resolved[library]))
        return NULL;
    int kept = errno;
    resolve(library);
    if (library_handle(library))
        atomic_store(&resolved[library], true);
    errno = kept;
    return atomic_load_explicit(&vgpu_driver_entries[entry], memory_order_acquire);
}

CUresult vgpu_no_cuda(void) {
    return library_handle(LIBRARY_CUDA) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NO_DEVICE;
}

nvmlReturn_t vgpu_no_nvml(void) {
    return library_handle(LIBRARY_NVML) ? NVML_ERROR_FUNCTION_NOT_FOUND : NVML_ERROR_LIBRARY_NOT_FOUND;
}

static void *ask_driver(const struct hook *hook) {
    static const cuuint64_t flags[] = {
        [ANY] = CU_GET_PROC_ADDRESS_DEFAULT,
        [LEGACY] = CU_GET_PROC_ADDRESS_LEGACY_STREAM,
        [PER_THREAD] = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
    };
    void *address = NULL;
    CUdriverProcAddressQueryResult status;
    if (DRIVER(cuGetProcAddress_v2))
        DRIVER(cuGetProcAddress_v2)(hook->name, &address, hook->version, flags[hook->stream], &status);
    else if (DRIVER(cuGetProcAddress))
        DRIVER(cuGetProcAddress)(hook->name, &address, hook->version, flags[hook->stream]);
    return address;
}

void vgpu_driver_learn_versions(void) {
    static atomic_bool done;
    if (atomic_load_explicit(&done, memory_order_acquire))
        return;
    for (int i = 0; i < VGPU_HOOK_COUNT; i++) {
        if (!hooks[i].name)
            continue;
        /* An older driver answers a version that it does not know with its newest one. That address is known already,
         * because the list names the oldest version first. */
        void *address = ask_driver(&hooks[i]);
        if (address && !vgpu_driver_hook_of(address)) {
            vgpu_driver_learn(i, address);
            vgpu_addresses_put(i, (uintptr_t)address); /* also the driver's own address, wherever its symbol leads */
        }
    }
    atomic_store_explicit(&done, true, memory_order_release);
}
