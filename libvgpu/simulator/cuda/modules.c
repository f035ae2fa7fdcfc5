/* Modules, libraries and their functions. Names come from `.entry NAME` in PTX and `.text.NAME` in a cubin. If an image
 * shows no name, or a part is compressed, every requested name exists. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

/* Reads the sizes of an entry's parameters: `.param .u64 name`, `.param .align 8 .b8 name[24]`. */
static void read_parameters(CUfunction function, const char *text, const char *end) {
    const char *close = text < end ? memchr(text, ')', (size_t)(end - text)) : NULL;
    if (!close || *text != '(')
        return;
    uint16_t sizes[MAX_PARAMETERS];
    int count = 0;
    for (const char *at = text; at < close && count < MAX_PARAMETERS;) {
        const char *comma = memchr(at, ',', (size_t)(close - at)), *stop = comma ? comma : close;
        const char *parameter = memmem(at, (size_t)(stop - at), ".param", 6);
        if (!parameter)
            break;
        unsigned bits = 64, elements = 1;
        for (const char *type = parameter + 6; type < stop - 1; type++)
            if (*type == '.' && strchr("bufs", type[1]) && isdigit((unsigned char)type[2]))
                bits = (unsigned)atoi(type + 2);
        const char *bracket = memchr(parameter, '[', (size_t)(stop - parameter));
        if (bracket)
            elements = (unsigned)atoi(bracket + 1);
        sizes[count++] = (uint16_t)(bits / 8 * elements);
        at = stop + 1;
    }
    function->parameter_sizes = malloc((size_t)count * sizeof *sizes + 1);
    if (function->parameter_sizes) {
        memcpy(function->parameter_sizes, sizes, (size_t)count * sizeof *sizes);
        function->parameters = count;
    }
}

static CUfunction add_function(CUmodule module, const char *name, size_t length) {
    for (unsigned i = 0; i < module->count; i++)
        if (strlen(module->functions[i]->name) == length && strncmp(module->functions[i]->name, name, length) == 0)
            return module->functions[i];
    CUfunction *functions = realloc(module->functions, (module->count + 1) * sizeof *functions);
    if (!functions)
        return NULL;
    module->functions = functions;
    CUfunction function = object_new(OBJECT_FUNCTION);
    if (!function)
        return NULL;
    function->module = module;
    function->name = strndup(name, length);
    function->parameters = -1;
    duration_read(&function->duration, function->name);
    touch_name(function);
    functions[module->count++] = function;
    return function;
}

static size_t name_length(const char *name, const char *end) {
    size_t length = 0;
    while (name + length < end && (isalnum((unsigned char)name[length]) || strchr("_$.%", name[length])) &&
           name[length])
        length++;
    return length;
}

static void scan(CUmodule module, const char *image, size_t size, const char *marker) {
    const char *end = image + size, *at = image;
    size_t skip = strlen(marker);
    while ((at = memmem(at, (size_t)(end - at), marker, skip))) {
        at += skip;
        while (at < end && isspace((unsigned char)*at))
            at++;
        size_t length = name_length(at, end);
        CUfunction function = length ? add_function(module, at, length) : NULL;
        at += length;
        while (function && at < end && isspace((unsigned char)*at))
            at++;
        if (function && function->parameters < 0 && at < end && *at == '(')
            read_parameters(function, at, end);
    }
}

/* Whether there may be further names. */
static bool read_names(CUmodule module, const struct image *image) {
    scan(module, image->bytes, image->size, ".entry ");
    scan(module, image->bytes, image->size, ".text.");
    return image->binary && (!module->count || image->compressed);
}

static CUresult load(CUcontext context, const void *given, CUmodule *out) {
    struct image image;
    if (!image_read(given, &image))
        return CUDA_ERROR_INVALID_IMAGE;
    CUresult result = charge(context->card, driver.sim.profile->module_bytes);
    if (result)
        return result;
    CUmodule module = object_new(OBJECT_MODULE);
    if (!module) {
        uncharge(context->card, driver.sim.profile->module_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    module->context = context;
    module->bytes = driver.sim.profile->module_bytes;
    module->opaque = read_names(module, &image);
    variables_read(module, &image);
    for (unsigned i = 0; i < module->count && !loading_lazy(); i++)
        function_load(module->functions[i]);
    *out = module;
    return CUDA_SUCCESS;
}

/* The module of a library in a context, loaded at its first use there; call with driver.lock held. */
static CUresult module_of(CUlibrary library, CUcontext context, CUmodule *out) {
    for (unsigned i = 0; i < library->module_count; i++)
        if (library->modules[i]->context == context) {
            *out = library->modules[i];
            return CUDA_SUCCESS;
        }
    CUmodule *modules = realloc(library->modules, (library->module_count + 1) * sizeof *modules);
    if (!modules)
        return CUDA_ERROR_OUT_OF_MEMORY;
    library->modules = modules;
    CUresult result = load(context, library->image, out);
    if (!result) {
        (*out)->library = library;
        modules[library->module_count++] = *out;
    }
    return result;
}

static void library_forget(CUlibrary library, CUmodule module) {
    for (unsigned i = 0; i < library->module_count; i++)
        if (library->modules[i] == module)
            library->modules[i--] = library->modules[--library->module_count];
}

void module_unload(CUmodule module) {
    for (unsigned i = 0; i < module->count; i++) {
        free(module->functions[i]->name);
        free(module->functions[i]->parameter_sizes);
        duration_free(&module->functions[i]->duration);
        object_free(module->functions[i]);
    }
    free(module->functions);
    variables_free(module);
    uncharge(module->context->card, module->bytes);
    if (module->library)
        library_forget(module->library, module);
    object_free(module);
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options,
                            void **values) {
    ENTER_CONTEXT(context);
    if (!out || !image || (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = load(context, image, out);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    INJECT();
    return cuModuleLoadDataEx(out, image, 0, NULL, NULL);
}
CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) {
    INJECT();
    return cuModuleLoadDataEx(out, image, 0, NULL, NULL);
}

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rbe");
    char *bytes = NULL;
    if (!file)
        return NULL;
    if (fseek(file, 0, SEEK_END) == 0) {
        long size = ftell(file);
        bytes = size >= 0 ? calloc(1, (size_t)size + 64) : NULL; /* headers are read without a check against the size */
        rewind(file);
        if (bytes && fread(bytes, 1, (size_t)size, file) != (size_t)size) {
            free(bytes);
            bytes = NULL;
        }
    }
    fclose(file);
    return bytes;
}

CUresult cuModuleLoad(CUmodule *out, const char *path) {
    ENTER();
    if (!out || !path)
        return CUDA_ERROR_INVALID_VALUE;
    char *image = read_file(path);
    if (!image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = cuModuleLoadData(out, image);
    free(image);
    return result;
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER();
    if (!object_is(module, OBJECT_MODULE) || module->library)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    module_unload(module);
    pthread_mutex_unlock(&driver.lock);
    return CUDA_SUCCESS;
}

static CUfunction find_function(CUmodule module, const char *name) {
    for (unsigned i = 0; i < module->count; i++)
        if (strcmp(module->functions[i]->name, name) == 0)
            return module->functions[i];
    return module->opaque ? add_function(module, name, strlen(name)) : NULL;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    ENTER();
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(module, OBJECT_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    CUfunction function = find_function(module, name);
    pthread_mutex_unlock(&driver.lock);
    if (!function)
        return CUDA_ERROR_NOT_FOUND;
    function->retrieved = true;
    if (driver.sim.timing.load_on_get)
        function_load(function);
    *out = function;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule module) {
    ENTER();
    if (!count || !object_is(module, OBJECT_MODULE))
        return !count ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *count = module->count;
    return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction *out, unsigned int count, CUmodule module) {
    ENTER();
    if (!out || !object_is(module, OBJECT_MODULE))
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < count && i < module->count; i++)
        out[i] = module->functions[i];
    return CUDA_SUCCESS;
}

/* A launch may name a kernel of a library instead of a function. */
CUresult function_resolve(CUfunction handle, CUcontext context, CUfunction *out) {
    if (object_is(handle, OBJECT_KERNEL)) {
        CUkernel kernel = (CUkernel)handle;
        CUmodule module;
        pthread_mutex_lock(&driver.lock);
        CUresult result = module_of(kernel->library, context, &module);
        if (!result) {
            *out = find_function(module, kernel->name);
            result = *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
            if (*out)
                (*out)->retrieved = true;
        }
        pthread_mutex_unlock(&driver.lock);
        return result;
    }
    *out = handle;
    return object_is(handle, OBJECT_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

struct into {
    CUlibrary library;
    CUresult result;
};

static void load_into(void *context, void *argument) {
    struct into *into = argument;
    CUmodule module;
    pthread_mutex_lock(&driver.lock);
    CUresult result = module_of(into->library, context, &module);
    pthread_mutex_unlock(&driver.lock);
    into->result = result ? result : into->result;
}

CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count) {
    ENTER();
    struct image image;
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    if (!out || !code)
        return CUDA_ERROR_INVALID_VALUE;
    if (!image_read(code, &image))
        return CUDA_ERROR_INVALID_IMAGE;
    CUlibrary library = object_new(OBJECT_LIBRARY);
    if (!library)
        return CUDA_ERROR_OUT_OF_MEMORY;
    library->image = calloc(1, image.size + 64);
    if (!library->image) {
        object_free(library);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(library->image, image.bytes, image.size);
    struct into into = {library, CUDA_SUCCESS};
    if (!loading_lazy())
        object_each(OBJECT_CONTEXT, load_into, &into);
    if (into.result)
        cuLibraryUnload(library);
    else
        *out = library;
    return into.result;
}

static void load_from(void *library, void *context) {
    CUmodule module;
    pthread_mutex_lock(&driver.lock);
    module_of(library, context, &module); /* without room, the first use tries again */
    pthread_mutex_unlock(&driver.lock);
}

void libraries_of_context_load(CUcontext context) {
    if (!loading_lazy())
        object_each(OBJECT_LIBRARY, load_from, context);
}

CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values,
                               unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count) {
    ENTER();
    if (!out || !path)
        return CUDA_ERROR_INVALID_VALUE;
    char *image = read_file(path);
    if (!image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = cuLibraryLoadData(out, image, jit, jit_values, jit_count, options, values, count);
    free(image);
    return result;
}

CUresult cuLibraryUnload(CUlibrary library) {
    ENTER();
    if (!object_is(library, OBJECT_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    while (library->module_count)
        module_unload(library->modules[0]);
    free(library->modules);
    for (unsigned i = 0; i < library->count; i++) {
        free(library->kernels[i]->name);
        object_free(library->kernels[i]);
    }
    free(library->kernels);
    free(library->image);
    object_free(library);
    pthread_mutex_unlock(&driver.lock);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *out, CUlibrary library) {
    ENTER_CONTEXT(context);
    if (!out || !object_is(library, OBJECT_LIBRARY))
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = module_of(library, context, out);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) {
    ENTER();
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(library, OBJECT_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    struct CUmod_st names = {.opaque = false};
    struct image image;
    pthread_mutex_lock(&driver.lock);
    CUkernel kernel = NULL;
    for (unsigned i = 0; i < library->count && !kernel; i++)
        if (strcmp(library->kernels[i]->name, name) == 0)
            kernel = library->kernels[i];
    if (!kernel) {
        names.opaque = image_read(library->image, &image) && read_names(&names, &image);
        bool known = names.opaque || find_function(&names, name);
        for (unsigned i = 0; i < names.count; i++) {
            free(names.functions[i]->name);
            free(names.functions[i]->parameter_sizes);
            duration_free(&names.functions[i]->duration);
            object_free(names.functions[i]);
        }
        free(names.functions);
        struct CUkern_st **kernels = known ? realloc(library->kernels, (library->count + 1) * sizeof *kernels) : NULL;
        if (kernels)
            library->kernels = kernels;
        kernel = kernels ? object_new(OBJECT_KERNEL) : NULL;
        if (kernel) {
            kernel->library = library;
            kernel->name = strdup(name);
            kernels[library->count++] = kernel;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    if (!kernel)
        return CUDA_ERROR_NOT_FOUND;
    *out = kernel;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    ENTER_CONTEXT(context);
    if (!out || !object_is(kernel, OBJECT_KERNEL))
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    return function_resolve((CUfunction)kernel, context, out);
}

CUresult cuKernelGetLibrary(CUlibrary *out, CUkernel kernel) {
    ENTER();
    if (!out || !object_is(kernel, OBJECT_KERNEL))
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = kernel->library;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) {
    ENTER();
    if (!name || !object_is(kernel, OBJECT_KERNEL))
        return !name ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *name = kernel->name;
    return CUDA_SUCCESS;
}
