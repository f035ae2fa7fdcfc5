/* Occupancy queries. Kernels have no code here, so they need no registers and no static shared memory. */
#include "cuda/driver.h"

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int threads,
                                                              size_t shared, unsigned int flags) {
    ENTER_CONTEXT(context);
    CUfunction function;
    const struct sim_profile *profile = driver.sim.profile;
    if (!blocks || threads <= 0 || threads > MAX_THREADS || flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = function_resolve(handle, context, &function);
    if (result)
        return result;
    function_load(function);
    int count = profile->threads_per_multiprocessor / threads;
    if (shared && (size_t)profile->shared_per_multiprocessor / shared < (size_t)count)
        count = profile->shared_per_multiprocessor / (int)shared;
    *blocks = count < profile->blocks_per_multiprocessor ? count : profile->blocks_per_multiprocessor;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    INJECT();
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function,
                                                   CUoccupancyB2DSize shared_of, size_t shared, int limit,
                                                   unsigned int flags) {
    INJECT();
    int blocks, threads = limit > 0 && limit < MAX_THREADS ? limit : MAX_THREADS;
    if (!grid || !block)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        &blocks, function, threads, shared_of ? shared_of(threads) : shared, flags);
    if (!result) {
        *block = threads;
        *grid = blocks * driver.sim.profile->multiprocessors;
    }
    return result;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared_of,
                                          size_t shared, int limit) {
    INJECT();
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared, limit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int threads) {
    ENTER_CONTEXT(context);
    CUfunction function;
    const struct sim_profile *profile = driver.sim.profile;
    if (!bytes || blocks <= 0 || threads <= 0 || threads > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = function_resolve(handle, context, &function);
    if (result)
        return result;
    function_load(function);
    int limit = function->dynamic_shared ? function->dynamic_shared : DEFAULT_SHARED;
    int each = profile->shared_per_multiprocessor / blocks;
    *bytes = (size_t)(each < limit ? each : limit);
    return CUDA_SUCCESS;
}

/* NVIDIA's programming guide, "Thread Block Clusters": 8 blocks are portable, from compute capability 9.0 on. */
#define PORTABLE_CLUSTER 8

static CUresult cluster_of(CUfunction handle, const CUlaunchConfig *config, int *blocks) {
    CUcontext context;
    CUfunction function;
    CUresult result = current_context(&context);
    if (!result)
        result = config ? function_resolve(handle, context, &function) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    function_load(function);
    *blocks = driver.sim.profile->major >= 9 ? PORTABLE_CLUSTER : 1;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int *size, CUfunction function, const CUlaunchConfig *config) {
    INJECT();
    return size ? cluster_of(function, config, size) : CUDA_ERROR_INVALID_VALUE;
}

/* The number of clusters that fit if each block of the launch's size gets a multiprocessor. */
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    INJECT();
    int blocks;
    CUresult result = clusters ? cluster_of(function, config, &blocks) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            const CUlaunchAttributeValue *value = &config->attrs[i].value;
            blocks = (int)(value->clusterDim.x * value->clusterDim.y * value->clusterDim.z);
        }
    *clusters = blocks > 0 ? driver.sim.profile->multiprocessors / blocks : 0;
    return CUDA_SUCCESS;
}
