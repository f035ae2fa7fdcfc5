/* Launches, and queries about functions. */
#include <string.h>

#include "cuda/driver.h"

/* cuda.h on cuLaunchKernel: a library's kernel runs in the context of its stream, or on the NULL stream in the current
 * context. So no context need be current if the call names both. A function belongs to its module's context, which must
 * be the stream's context. */
static CUresult resolve(CUfunction *function, CUstream handle, CUstream *stream) {
    bool named = object_is(*function, OBJECT_KERNEL) && object_is(handle, OBJECT_STREAM);
    CUcontext current = NULL;
    *stream = handle;
    CUresult result = named ? CUDA_SUCCESS : current_context(&current);
    if (!result && !named)
        result = stream_resolve(handle, stream);
    if (!result && (*stream)->context->failed)
        result = (CUresult)(*stream)->context->failed;
    if (!result)
        result = function_resolve(*function, (*stream)->context, function);
    if (result)
        return result;
    if ((*function)->module->context != (*stream)->context ||
        (current && current != (*stream)->context && strict_about("launch-context")))
        return CUDA_ERROR_INVALID_HANDLE;
    return CUDA_SUCCESS;
}

/* `shape` comes without pointers; touch_read fills in the memory that the launch touches. */
static CUresult launch(struct launch_shape *shape, CUstream handle, void **params, void **extra) {
    CUstream stream;
    if (!shape->function)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = resolve(&shape->function, handle, &stream);
    if (result)
        return result;
    function_load(shape->function);
    for (int i = 0; i < 3; i++)
        if (!shape->grid[i] || !shape->block[i] || shape->block[i] > (i == 2 ? 64u : 1024u) ||
            shape->grid[i] > (i ? 65535u : 0x7fffffffu))
            return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)shape->block[0] * shape->block[1] * shape->block[2] > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    if (shape->shared > 49152u && (int)shape->shared > shape->function->dynamic_shared)
        return CUDA_ERROR_INVALID_VALUE;
    shape->argument = function_argument(shape->function, params, extra);
    if (stream->capture || touch_matters(shape->function))
        touch_read(shape, params, extra);
    result = capture_kernel(stream, shape);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    int card = stream->context->card; /* another thread may destroy the stream while this one waits */
    result = stream_launch(stream, shape);
    if (!result)
        sim_wait_queued(&driver.sim, card);
    return result;
}

static void shape_of(struct launch_shape *shape, CUfunction function, const unsigned grid[3], const unsigned block[3],
                     unsigned shared) {
    shape->function = function;
    memcpy(shape->grid, grid, sizeof shape->grid);
    memcpy(shape->block, block, sizeof shape->block);
    shape->shared = shared;
    shape->pointers = 0;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void **params, void **extra) {
    ENTER();
    if (params && extra)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch_shape shape;
    shape_of(&shape, function, (unsigned[]){grid_x, grid_y, grid_z}, (unsigned[]){block_x, block_y, block_z}, shared);
    return launch(&shape, stream, params, extra);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                   unsigned int shared, CUstream stream, void **params) {
    ENTER();
    const struct sim_profile *profile = driver.sim.profile;
    uint64_t threads = (uint64_t)block_x * block_y * block_z, blocks = (uint64_t)grid_x * grid_y * grid_z;
    uint64_t resident = threads ? (uint64_t)profile->threads_per_multiprocessor / threads : 0;
    if (resident > (uint64_t)profile->blocks_per_multiprocessor)
        resident = (uint64_t)profile->blocks_per_multiprocessor;
    if (threads && threads <= MAX_THREADS && blocks > resident * (uint64_t)profile->multiprocessors)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    struct launch_shape shape;
    shape_of(&shape, function, (unsigned[]){grid_x, grid_y, grid_z}, (unsigned[]){block_x, block_y, block_z}, shared);
    return launch(&shape, stream, params, NULL);
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    ENTER();
    if (!list || !count || flags & ~3u)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        if (!object_is(list[i].hStream, OBJECT_STREAM))
            return CUDA_ERROR_INVALID_HANDLE;
        cuCtxPushCurrent_v2(list[i].hStream->context);
        CUresult result = cuLaunchCooperativeKernel(
            list[i].function, list[i].gridDimX, list[i].gridDimY, list[i].gridDimZ, list[i].blockDimX,
            list[i].blockDimY, list[i].blockDimZ, list[i].sharedMemBytes, list[i].hStream, list[i].kernelParams);
        cuCtxPopCurrent_v2(NULL);
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    ENTER();
    if (!config || (params && extra) || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config->attrs[i].value.cooperative)
            return cuLaunchCooperativeKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                                             config->blockDimX, config->blockDimY, config->blockDimZ,
                                             config->sharedMemBytes, config->hStream, params);
    struct launch_shape shape;
    shape_of(&shape, function, (unsigned[]){config->gridDimX, config->gridDimY, config->gridDimZ},
             (unsigned[]){config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes);
    return launch(&shape, config->hStream, params, extra);
}

/* CUDA 3 sets the block shape on the function. */
CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
    ENTER();
    if (!object_is(function, OBJECT_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    return x > 0 && y > 0 && z > 0 && (int64_t)x * y * z <= MAX_THREADS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    ENTER();
    if (width <= 0 || height <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch_shape shape;
    shape_of(&shape, function, (unsigned[]){(unsigned)width, (unsigned)height, 1}, (unsigned[]){1, 1, 1}, 0);
    return launch(&shape, stream, NULL, NULL);
}

CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    INJECT();
    return cuLaunchGridAsync(function, width, height, NULL);
}
CUresult cuLaunch(CUfunction function) {
    INJECT();
    return cuLaunchGrid(function, 1, 1);
}

static CUresult parameter_call(CUfunction function) {
    ENTER();
    return object_is(function, OBJECT_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetSharedSize(CUfunction function, unsigned int bytes) {
    INJECT();
    return (void)bytes, parameter_call(function);
}
CUresult cuParamSetSize(CUfunction function, unsigned int bytes) {
    INJECT();
    return (void)bytes, parameter_call(function);
}
CUresult cuParamSeti(CUfunction function, int offset, unsigned int value) {
    INJECT();
    return (void)offset, (void)value, parameter_call(function);
}
CUresult cuParamSetf(CUfunction function, int offset, float value) {
    INJECT();
    return (void)offset, (void)value, parameter_call(function);
}
CUresult cuParamSetv(CUfunction function, int offset, void *data, unsigned int bytes) {
    INJECT();
    return (void)offset, (void)bytes, data ? parameter_call(function) : CUDA_ERROR_INVALID_VALUE;
}

/* Attributes that may be set; a launch ignores them. */
#define FIRST_OF_CLUSTERS CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
static bool of_clusters(CUfunction_attribute attribute) {
    return attribute >= FIRST_OF_CLUSTERS && attribute <= CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
}

static CUresult attribute_of(CUfunction_attribute attribute, CUfunction function, int *value) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = MAX_THREADS; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = driver.sim.profile->major * 10 + driver.sim.profile->minor; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function && function->dynamic_shared ? function->dynamic_shared : DEFAULT_SHARED;
        break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = function ? function->carveout : -1; break;
    default: *value = function && of_clusters(attribute) ? function->clusters[attribute - FIRST_OF_CLUSTERS] : 0;
    }
    return (int)attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* cuda.h on cuFuncGetAttribute */
static bool needs_code(CUfunction_attribute attribute) {
    return attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK || attribute == CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES ||
           attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    ENTER_CONTEXT(context);
    CUfunction function;
    CUresult result = value ? function_resolve(handle, context, &function) : CUDA_ERROR_INVALID_VALUE;
    if (!result && needs_code(attribute) && !function->loaded) {
        if (!function->retrieved)
            return CUDA_ERROR_FUNCTION_NOT_LOADED;
        function_load(function);
    }
    return result ? result : attribute_of(attribute, function, value);
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    ENTER_CONTEXT(context);
    CUfunction function;
    CUresult result = function_resolve(handle, context, &function);
    if (result)
        return result;
    function_load(function);
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || value > driver.sim.profile->shared_per_block_optin)
            return CUDA_ERROR_INVALID_VALUE;
        function->dynamic_shared = value;
    } else if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
        function->carveout = value;
    } else if (of_clusters(attribute)) {
        function->clusters[attribute - FIRST_OF_CLUSTERS] = value;
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    ENTER_DEVICE(device);
    if (!value || !object_is(kernel, OBJECT_KERNEL))
        return !value ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    return attribute_of(attribute, NULL, value);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    ENTER_DEVICE(device);
    (void)attribute, (void)value;
    return object_is(kernel, OBJECT_KERNEL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    INJECT();
    return (void)config, parameter_call(function);
}
CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig config) {
    INJECT();
    return (void)config, parameter_call(function);
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function) {
    INJECT();
    CUresult result = parameter_call(function);
    if (result || !module)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *module = function->module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    INJECT();
    CUresult result = parameter_call(function);
    if (result || !name)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *name = function->name;
    return CUDA_SUCCESS;
}

/* Known for PTX entries; the simulator does not read the parameters of a binary. */
static CUresult parameter_of(CUfunction function, size_t index, size_t *offset, size_t *size) {
    size_t at = 0;
    if (!offset || function->parameters < 0 || index >= (size_t)function->parameters)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0;; i++) {
        size_t bytes = function->parameter_sizes[i], alignment = bytes < 8 && bytes ? bytes : 8;
        at = (at + alignment - 1) / alignment * alignment;
        if (i == index) {
            *offset = at;
            if (size)
                *size = bytes;
            return CUDA_SUCCESS;
        }
        at += bytes;
    }
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    INJECT();
    CUresult result = parameter_call(function);
    return result ? result : parameter_of(function, index, offset, size);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    ENTER_CONTEXT(context);
    CUfunction function;
    if (!object_is(kernel, OBJECT_KERNEL))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = function_resolve((CUfunction)kernel, context, &function);
    return result ? result : parameter_of(function, index, offset, size);
}
