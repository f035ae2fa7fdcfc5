/* Devices and their properties. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

static int card_of(CUdevice device) {
    return driver.visible[device];
}

CUresult cuDeviceGetCount(int *count) {
    ENTER();
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = driver.count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER_DEVICE(device);
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", driver.sim.profile->name);
    return CUDA_SUCCESS;
}

static void read_uuid(const char *text, CUuuid *uuid) {
    text += 4;
    for (int i = 0; i < 16; text += *text == '-') {
        char digits[3] = {text[0], text[1], 0};
        uuid->bytes[i++] = (char)strtoul(digits, NULL, 16);
        text += 2;
    }
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER_DEVICE(device);
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    read_uuid(driver.sim.state->cards[card_of(device)].uuid, uuid);
    return CUDA_SUCCESS;
}

/* For a MIG instance the older form returns the UUID of the board. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER_DEVICE(device);
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    read_uuid(driver.sim.profile->mig ? driver.sim.state->board_uuid : driver.sim.state->cards[card_of(device)].uuid,
              uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER_DEVICE(device);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = sim_usable(driver.sim.profile);
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    ENTER_DEVICE(device);
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = driver.sim.profile->major;
    *minor = driver.sim.profile->minor;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *prop, CUdevice device) {
    ENTER_DEVICE(device);
    if (!prop)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024,
                        .maxThreadsDim = {1024, 1024, 64},
                        .maxGridSize = {0x7fffffff, 65535, 65535},
                        .sharedMemPerBlock = 49152,
                        .totalConstantMemory = 65536,
                        .SIMDWidth = 32,
                        .memPitch = 0x7fffffff,
                        .regsPerBlock = 65536,
                        .clockRate = driver.sim.profile->clock_mhz * 1000,
                        .textureAlign = 512};
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER_DEVICE(device);
    unsigned domain, bus;
    if (!text || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    sim_pci_address(&driver.sim, card_of(device), &domain, &bus);
    snprintf(text, (size_t)length, "%04X:%02X:00.0", domain, bus);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    ENTER();
    unsigned domain = 0, bus, slot, function = 0;
    if (!device || !text)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
        domain = 0;
        if (sscanf(text, "%x:%x.%x", &bus, &slot, &function) < 2)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < driver.count; i++) {
        unsigned own_domain, own_bus;
        sim_pci_address(&driver.sim, card_of(i), &own_domain, &own_bus);
        if (own_domain == domain && own_bus == bus && slot == 0) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetLuid(char *luid, unsigned int *mask, CUdevice device) {
    ENTER_DEVICE(device);
    return luid && mask ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE; /* Windows only */
}

/* Equal for every profile. Attributes that are not listed are 0: the simulated boards do not have that ability. */
static const struct {
    CUdevice_attribute attribute;
    int value;
} fixed[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0x7fffffff},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, 16384},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
    {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID, 0},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
};

/* The CUDA version that introduced an attribute about host memory; older drivers return an error (invalid value). */
static int known_since(CUdevice_attribute attribute) {
    return attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID                                   ? 12020
           : attribute < CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 0
           : attribute < CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED                   ? 12090
                                                                                           : 13000;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER_DEVICE(device);
    const struct sim_profile *profile = driver.sim.profile;
    unsigned domain, bus;
    if (!value || (int)attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_driver()->cuda < known_since(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    sim_pci_address(&driver.sim, card_of(device), &domain, &bus);
    *value = 0;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = sim_node_of(&driver.sim, card_of(device)); break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = host_memory_is_physical(); break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)mps_reported_multiprocessors(); break;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: *value = mps_enabled(); break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = profile->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = profile->minor; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = profile->clock_mhz * 1000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = profile->memory_clock_mhz * 1000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = profile->bus_width; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = profile->l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = profile->threads_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = profile->blocks_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = profile->shared_per_block_optin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = profile->shared_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = profile->major >= 8 ? 5 : 3; break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = profile->major >= 9; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = (int)domain; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = (int)bus; break;
    case CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID: *value = (int)profile->pci_device; break;
    case CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID: *value = (int)profile->pci_subsystem; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: *value = profile->unified; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        *value = multicast_supported(profile, driver.sim.state->card_count);
        break;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: *value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; break;
    default:
        for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
            if (fixed[i].attribute == attribute)
                *value = fixed[i].value;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER_DEVICE(device);
    if (device_check(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    *can = device != peer && driver.sim.profile->nvlinks > 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer) {
    ENTER_DEVICE(device);
    if (device_check(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!value || device == peer)
        return !value ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = 0; break;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = driver.sim.profile->nvlinks > 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device) {
    ENTER_DEVICE(device);
    if (!supported || type != CU_EXEC_AFFINITY_TYPE_SM_COUNT)
        return CUDA_ERROR_INVALID_VALUE;
    *supported = 0;
    return CUDA_SUCCESS;
}
