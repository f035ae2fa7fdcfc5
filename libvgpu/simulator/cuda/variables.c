/* Variables of modules. They cost nothing in addition to their module, because its bytes count as containing them. */
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

/* Address space of a variable whose size cannot be read. */
#define UNREAD_BYTES MIB

struct variable {
    char *name;
    CUdeviceptr address; /* 0: no call has asked for it */
    uint64_t size;
    struct variable *next;
};

static struct variable *find(CUmodule module, const char *name, size_t length) {
    struct variable *one = module->variables;
    while (one && (strlen(one->name) != length || strncmp(one->name, name, length) != 0))
        one = one->next;
    return one;
}

static void add(CUmodule module, const char *name, size_t length, uint64_t size) {
    if (find(module, name, length))
        return;
    struct variable *one = calloc(1, sizeof *one);
    char *copy = strndup(name, length);
    if (!one || !copy) {
        free(one);
        free(copy);
        return;
    }
    *one = (struct variable){copy, 0, size, module->variables};
    module->variables = one;
}

void variables_read(CUmodule module, const struct image *image) {
    image_variables(image, add, module);
}

void variables_free(CUmodule module) {
    for (struct variable *one; (one = module->variables);) {
        struct block block;
        module->variables = one->next;
        if (one->address)
            block_take(one->address, BLOCK_VARIABLE, &block);
        free(one->name);
        free(one);
    }
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
    ENTER();
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(module, OBJECT_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    if (module->opaque && *name && !find(module, name, strlen(name)))
        add(module, name, strlen(name), UNREAD_BYTES);
    struct variable *one = find(module, name, strlen(name));
    if (one && !one->address)
        one->address = block_new(one->size, module->context, BLOCK_VARIABLE, NULL);
    CUresult result = !one ? CUDA_ERROR_NOT_FOUND : !one->address ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (!result && address)
        *address = one->address;
    if (!result && bytes)
        *bytes = one->size;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* cuda.h: the variable in the current context, into which the library is loaded. */
CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name) {
    INJECT();
    CUmodule module;
    CUresult result = cuLibraryGetModule(&module, library);
    return result ? result : cuModuleGetGlobal_v2(address, bytes, module, name);
}
