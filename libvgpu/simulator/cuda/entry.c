/* cuGetProcAddress: entry points by name, CUDA version and default stream, from entries.def. */
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define ENTRY(base, symbol, version)
#define PER_THREAD_ENTRY(base, symbol, version, per_thread, per_thread_version)
#define UNSUPPORTED(base, symbol, version)                                                                             \
    __attribute__((visibility("default"))) CUresult simulated_##symbol(void) __asm__(#symbol);
#define PER_THREAD_UNSUPPORTED(base, symbol, version, variant, variant_version)                                        \
    UNSUPPORTED(base, symbol, version) UNSUPPORTED(base, variant, version)
#include "cuda/entries.def"
#undef ENTRY
#undef PER_THREAD_ENTRY
#undef UNSUPPORTED
#undef PER_THREAD_UNSUPPORTED

static struct entry {
    const char *base;
    void *address, *per_thread;
    int version, per_thread_version;
} entries[] = {
#define ENTRY(base, symbol, version) {#base, (void *)symbol, NULL, version, 0},
#define PER_THREAD_ENTRY(base, symbol, version, variant, variant_version)                                              \
    {#base, (void *)symbol, (void *)variant, version, variant_version},
#define UNSUPPORTED(base, symbol, version) {#base, (void *)simulated_##symbol, NULL, version, 0},
#define PER_THREAD_UNSUPPORTED(base, symbol, version, variant, variant_version)                                        \
    {#base, (void *)simulated_##symbol, (void *)simulated_##variant, version, variant_version},
#include "cuda/entries.def"
};
#undef ENTRY
#undef PER_THREAD_ENTRY
#undef UNSUPPORTED
#undef PER_THREAD_UNSUPPORTED
#define COUNT (sizeof entries / sizeof *entries)

/* The real driver has these calls; the simulator does not implement them. */
#define ENTRY(base, symbol, version)
#define PER_THREAD_ENTRY(base, symbol, version, per_thread, per_thread_version)
#define PER_THREAD_UNSUPPORTED(base, symbol, version, variant, variant_version)                                        \
    UNSUPPORTED(base, symbol, version) UNSUPPORTED(base, variant, version)
#define UNSUPPORTED(base, symbol, version)                                                                             \
    CUresult simulated_##symbol(void) {                                                                                \
        int injected = sim_faults_armed(&driver.sim) ? sim_fault(&driver.sim, #symbol) : 0;                            \
        if (injected)                                                                                                  \
            return (CUresult)injected;                                                                                 \
        return driver_ready() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NOT_INITIALIZED;                                 \
    }
#include "cuda/entries.def"

static int by_base_and_version(const void *left, const void *right) {
    const struct entry *a = left, *b = right;
    int order = strcmp(a->base, b->base);
    return order ? order : a->version - b->version;
}

static void sort_entries(void) {
    qsort(entries, COUNT, sizeof *entries, by_base_and_version);
}

/* The newest variant that is not newer than the version; *known: the simulated driver has the base name. */
static void *find(const char *base, int version, bool per_thread, bool *known) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, sort_entries);
    size_t low = 0, high = COUNT;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(entries[middle].base, base) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    void *found = NULL;
    int newest = sim_driver()->cuda;
    for (*known = false; low < COUNT && strcmp(entries[low].base, base) == 0 && entries[low].version <= newest; low++) {
        *known = true;
        if (per_thread && entries[low].per_thread && entries[low].per_thread_version <= version)
            found = entries[low].per_thread;
        else if (entries[low].version <= version)
            found = entries[low].address;
    }
    return found;
}

/* cuda.h on cuGetProcAddress: an unknown name is no error, but gives NULL and a status. */
CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    INJECT();
    bool known;
    if (!symbol || !out || flags & ~(cuuint64_t)3 || flags == 3 || version > sim_driver()->cuda)
        return CUDA_ERROR_INVALID_VALUE;
    *out = find(symbol, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &known);
    if (status)
        *status = *out    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* From CUDA 11.3: has no status, so an unknown name is an error. */
CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags) {
    INJECT();
    CUresult result = cuGetProcAddress_v2(symbol, out, version, flags, NULL);
    return result ? result : *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
