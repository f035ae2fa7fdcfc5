/* A libnvidia-ml.so.1 of a machine with one card, all of whose memory confidential computing protects, and most of
 * which a neighbour holds. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>

#define GIB (1ull << 30)

nvmlReturn_t nvmlInit_v2(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)4096;
    return index ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    (void)device;
    *index = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    (void)device;
    snprintf(uuid, length, "GPU-07070707-0707-0707-0707-070707070707");
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetConfComputeProtectedMemoryUsage(nvmlDevice_t device, nvmlMemory_t *memory) {
    (void)device;
    *memory = (nvmlMemory_t){.total = 8 * GIB, .free = 2 * GIB, .used = 6 * GIB};
    return NVML_SUCCESS;
}
