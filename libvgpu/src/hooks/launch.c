/* Hooks of all calls that start work on a card. */
#define _GNU_SOURCE
#include "hooks/gated.h"
#include "ledger/charge.h"
#include "pacer/pacer.h"
#include "pacer/prepaid.h"
#include "tier/touched.h"

/* Blocks or threads of a launch. On an overflow the launch is invalid, and the driver refuses it. */
static inline uint64_t product(uint64_t x, uint64_t y, uint64_t z) {
    return x * y * z;
}

/* Defines the hook `symbol`. Without limits it tests one flag and jumps to the driver's function. A launch that is paid
 * in advance calls no other function either. All the rest is in a separate function, so that the hook need not keep its
 * arguments. Launches that the driver will refuse at once (`countable` is false) go straight to the driver. If blocks
 * can move, all launches take the slow path (vgpu_one_card says so): `touch` notes the touched blocks, and the launch
 * waits for its start before it passes the gate. */
#define PACED(symbol, parameters, arguments, countable, key, stream, what, touch)                                      \
    static __attribute__((noinline)) CUresult paced_##symbol parameters {                                              \
        CUDA_REAL(symbol);                                                                                             \
        if (!(countable))                                                                                              \
            return real arguments;                                                                                     \
        struct vgpu_launch launch;                                                                                     \
        launch.function = what;                                                                                        \
        if (!vgpu_gate_is_armed()) {                                                                                   \
            if (__builtin_expect(!vgpu_pacer_before(&launch, key, stream), 0))                                         \
                return CUDA_ERROR_OUT_OF_MEMORY;                                                                       \
            return vgpu_pacer_after(&launch, real arguments);                                                          \
        }                                                                                                              \
        vgpu_safe_point();                                                                                             \
        touch;                                                                                                         \
        launch.counted = false;                                                                                        \
        if (!vgpu_pacer_prepaid_gated(key, stream) && __builtin_expect(!vgpu_pacer_before(&launch, key, stream), 0))   \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        vgpu_handing_in(stream);                                                                                       \
        CUresult result = real arguments;                                                                              \
        vgpu_handed_in();                                                                                              \
        return vgpu_pacer_after(&launch, result);                                                                      \
    }                                                                                                                  \
    static __attribute__((noinline)) CUresult counted_##symbol parameters {                                            \
        __typeof__(&symbol) direct =                                                                                   \
            (__typeof__(&symbol))atomic_load_explicit(&vgpu_driver_entries[ENTRY_##symbol], memory_order_acquire);     \
        if (__builtin_expect(direct != NULL, 1) && (countable) && vgpu_pacer_prepaid(key, stream))                     \
            return direct arguments;                                                                                   \
        return paced_##symbol arguments;                                                                               \
    }                                                                                                                  \
    CUresult symbol parameters {                                                                                       \
        __typeof__(&symbol) direct =                                                                                   \
            (__typeof__(&symbol))atomic_load_explicit(&vgpu_driver_entries[ENTRY_##symbol], memory_order_acquire);     \
        if (__builtin_expect(!direct || !atomic_load_explicit(&vgpu_never_limited, memory_order_relaxed), 0))          \
            return counted_##symbol arguments;                                                                         \
        return direct arguments;                                                                                       \
    }

#define SHAPE                                                                                                          \
    CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,          \
        unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters
#define SHAPED function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters
#define SHAPE_KEY vgpu_cost_key(function, product(grid_x, grid_y, grid_z), product(block_x, block_y, block_z))

PACED(cuLaunchKernel, (SHAPE, void **extra), (SHAPED, extra), true, SHAPE_KEY, stream, function,
      vgpu_touched_kernel(function, parameters, extra))
PACED(cuLaunchKernel_ptsz, (SHAPE, void **extra), (SHAPED, extra), true, SHAPE_KEY, per_thread(stream), function,
      vgpu_touched_kernel(function, parameters, extra))
PACED(cuLaunchCooperativeKernel, (SHAPE), (SHAPED), true, SHAPE_KEY, stream, function,
      vgpu_touched_kernel(function, parameters, NULL))
PACED(cuLaunchCooperativeKernel_ptsz, (SHAPE), (SHAPED), true, SHAPE_KEY, per_thread(stream), function,
      vgpu_touched_kernel(function, parameters, NULL))

static uint64_t config_key(const CUlaunchConfig *config, CUfunction function) {
    return vgpu_cost_key(function, product(config->gridDimX, config->gridDimY, config->gridDimZ),
                         product(config->blockDimX, config->blockDimY, config->blockDimZ));
}

PACED(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra),
      (config, function, parameters, extra), config != NULL, config_key(config, function), config->hStream, function,
      vgpu_touched_kernel(function, parameters, extra))
PACED(cuLaunchKernelEx_ptsz, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra),
      (config, function, parameters, extra), config != NULL, config_key(config, function), per_thread(config->hStream),
      function, vgpu_touched_kernel(function, parameters, extra))

static uint64_t list_key(const CUDA_LAUNCH_PARAMS *list) {
    return vgpu_cost_key(list->function, product(list->gridDimX, list->gridDimY, list->gridDimZ),
                         product(list->blockDimX, list->blockDimY, list->blockDimZ));
}

static void touched_by_list(const CUDA_LAUNCH_PARAMS *list, unsigned devices) {
    for (unsigned i = 0; i < devices; i++)
        vgpu_touched_kernel(list[i].function, list[i].kernelParams, NULL);
}

/* One launch on several cards at once pays on each card, because it runs equally long on all of them. */
static uint32_t cards_of_list(const CUDA_LAUNCH_PARAMS *list, unsigned devices) {
    uint32_t cards = 0;
    struct vgpu_place place;
    for (unsigned i = 0; i < devices; i++)
        if (vgpu_place_of_stream(list[i].hStream, &place) && place.card < VGPU_MAX_CARDS)
            cards |= 1u << place.card;
    return cards;
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int devices, unsigned int flags) {
    CUDA_REAL(cuLaunchCooperativeKernelMultiDevice);
    struct vgpu_launch launch = {.function = NULL};
    if (!list || !devices || vgpu_enforcement() == VGPU_UNLIMITED)
        return real(list, devices, flags);
    const bool gated = vgpu_gate_is_armed();
    if (gated) {
        vgpu_safe_point();
        touched_by_list(list, devices);
    }
    if (!vgpu_pacer_before_on(&launch, list_key(list), list->hStream, cards_of_list(list, devices)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (gated)
        vgpu_handing_in(list->hStream);
    const CUresult result = real(list, devices, flags);
    if (gated)
        vgpu_handed_in();
    return vgpu_pacer_after(&launch, result);
}

static uint64_t plane_key(CUfunction function, int width, int height) {
    return vgpu_cost_key(function, product((uint64_t)width, (uint64_t)height, 1), 0);
}

/* Earlier calls, which have no hooks, set these parameters one by one. */
#define NOTHING (void)0
PACED(cuLaunch, (CUfunction function), (function), true, plane_key(function, 1, 1), CU_STREAM_LEGACY, function, NOTHING)
PACED(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height), true,
      plane_key(function, width, height), CU_STREAM_LEGACY, function, NOTHING)
PACED(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream),
      (function, width, height, stream), true, plane_key(function, width, height), stream, function, NOTHING)
