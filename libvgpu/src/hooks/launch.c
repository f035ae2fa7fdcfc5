/* Every way to start work on a card. */
#define _GNU_SOURCE
#include "pacer.h"

static CUstream per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/* Saturating product: a senseless grid is refused by the driver, not here. */
static uint64_t product(uint64_t x, uint64_t y, uint64_t z) {
    uint64_t xy, xyz;
    return __builtin_mul_overflow(x, y, &xy) || __builtin_mul_overflow(xy, z, &xyz) ? UINT64_MAX : xyz;
}

#define PACED(key, stream, call)                                                                                                                   \
    struct vgpu_launch launch;                                                                                                                     \
    if (__builtin_expect(!vgpu_pacer_before(&launch, key, stream), 0))                                                                             \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                                           \
    return vgpu_pacer_after(&launch, call)

#define KERNEL_KEY vgpu_cost_key(function, product(grid_x, grid_y, grid_z), product(block_x, block_y, block_z))

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                        unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters, void **extra) {
    CUDA_REAL(cuLaunchKernel);
    PACED(KERNEL_KEY, stream, real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra));
}

CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                             unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters, void **extra) {
    CUDA_REAL(cuLaunchKernel_ptsz);
    PACED(KERNEL_KEY, per_thread(stream), real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra));
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                                   unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters) {
    CUDA_REAL(cuLaunchCooperativeKernel);
    PACED(KERNEL_KEY, stream, real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters));
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                                        unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters) {
    CUDA_REAL(cuLaunchCooperativeKernel_ptsz);
    PACED(KERNEL_KEY, per_thread(stream), real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters));
}

static uint64_t config_key(const CUlaunchConfig *config, CUfunction function) {
    return vgpu_cost_key(function, product(config->gridDimX, config->gridDimY, config->gridDimZ),
                         product(config->blockDimX, config->blockDimY, config->blockDimZ));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    CUDA_REAL(cuLaunchKernelEx);
    if (!config)
        return real(config, function, parameters, extra);
    PACED(config_key(config, function), config->hStream, real(config, function, parameters, extra));
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    CUDA_REAL(cuLaunchKernelEx_ptsz);
    if (!config)
        return real(config, function, parameters, extra);
    PACED(config_key(config, function), per_thread(config->hStream), real(config, function, parameters, extra));
}

/* One launch on several cards at once: paid on the card of the current context alone, as all of them run for the same time. */
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int devices, unsigned int flags) {
    CUDA_REAL(cuLaunchCooperativeKernelMultiDevice);
    if (!list || !devices)
        return real(list, devices, flags);
    uint64_t key = vgpu_cost_key(list->function, product(list->gridDimX, list->gridDimY, list->gridDimZ),
                                 product(list->blockDimX, list->blockDimY, list->blockDimZ));
    PACED(key, list->hStream, real(list, devices, flags));
}

CUresult cuLaunch(CUfunction function) {
    CUDA_REAL(cuLaunch);
    PACED(vgpu_cost_key(function, 1, 0), CU_STREAM_LEGACY, real(function));
}

CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    CUDA_REAL(cuLaunchGrid);
    PACED(vgpu_cost_key(function, product((uint64_t)width, (uint64_t)height, 1), 0), CU_STREAM_LEGACY, real(function, width, height));
}

CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    CUDA_REAL(cuLaunchGridAsync);
    PACED(vgpu_cost_key(function, product((uint64_t)width, (uint64_t)height, 1), 0), stream, real(function, width, height, stream));
}
