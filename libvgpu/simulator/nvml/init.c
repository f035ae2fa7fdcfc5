/* nvmlInit, versions, errors and calls that concern no device. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nvml/library.h"

struct library library;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

nvmlReturn_t library_ready(void) {
    return library.users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t device_check(nvmlDevice_t device) {
    if (!library.users)
        return NVML_ERROR_UNINITIALIZED;
    uintptr_t offset = (uintptr_t)device - (uintptr_t)library.devices;
    bool known = offset % sizeof *device == 0 && offset / sizeof *device < (uintptr_t)library.handles;
    return known ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

const struct sim_profile *profile_of(nvmlDevice_t device) {
    return device->kind == DEVICE_BOARD ? sim_profile_at(library.sim.profile->board) : library.sim.profile;
}

static nvmlReturn_t start(void) {
    int cards[SIM_CARDS], error = sim_open_environment(&library.sim);
    if (error)
        return error == -EEXIST ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_ERROR_DRIVER_NOT_LOADED;
    int injected = sim_faults_armed(&library.sim) ? sim_fault(&library.sim, "nvmlInitWithFlags") : 0;
    if (injected) {
        sim_close(&library.sim);
        return (nvmlReturn_t)injected;
    }
    int count = sim_container_cards(&library.sim, cards);
    if (count < 0) {
        sim_close(&library.sim);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    bool mig = library.sim.profile->mig && count;
    if (mig)
        library.devices[0] = (struct nvmlDevice_st){.card = cards[0], .kind = DEVICE_BOARD};
    for (int i = 0; i < count; i++)
        library.devices[i + mig] =
            (struct nvmlDevice_st){.card = cards[i], .kind = mig ? DEVICE_INSTANCE : DEVICE_CARD};
    library.count = mig ? 1 : count;
    library.handles = count + mig;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = library.users ? NVML_SUCCESS : start();
    library.users += result == NVML_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}
nvmlReturn_t nvmlInit(void) {
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = library.users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (library.users && !--library.users) {
        library.count = library.handles = 0;
        sim_close(&library.sim);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    static const char *const texts[] = {[NVML_SUCCESS] = "Success",
                                        [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
                                        [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
                                        [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
                                        [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
                                        [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
                                        [NVML_ERROR_NOT_FOUND] = "Not Found",
                                        [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
                                        [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
                                        [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
                                        [NVML_ERROR_TIMEOUT] = "Timeout",
                                        [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
                                        [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
                                        [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
                                        [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
                                        [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
                                        [NVML_ERROR_RESET_REQUIRED] = "GPU requires restart",
                                        [NVML_ERROR_OPERATING_SYSTEM] = "The operating system has blocked the request.",
                                        [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
                                        [NVML_ERROR_IN_USE] = "In use by another client",
                                        [NVML_ERROR_MEMORY] = "Insufficient memory",
                                        [NVML_ERROR_NO_DATA] = "No data",
                                        [NVML_ERROR_ARGUMENT_VERSION_MISMATCH] = "Argument version mismatch",
                                        [NVML_ERROR_DEPRECATED] = "Deprecated",
                                        [NVML_ERROR_NOT_READY] = "Not ready",
                                        [NVML_ERROR_GPU_NOT_FOUND] = "No GPUs were found",
                                        [NVML_ERROR_INVALID_STATE] = "Invalid state"};
    const char *text = (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : NULL;
    return text ? text : "Unknown Error";
}

nvmlReturn_t put_text(char *out, unsigned length, const char *text) {
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

nvmlReturn_t put_list(void *out, unsigned *count, const void *items, unsigned have, size_t size) {
    unsigned room = *count;
    *count = have;
    if (have > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (have && !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (have)
        memcpy(out, items, have * size);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    ENTER();
    return put_text(version, length, sim_driver()->version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    char text[32];
    snprintf(text, sizeof text, "%d.%s", sim_driver()->cuda / 1000, sim_driver()->version);
    return put_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER();
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = sim_driver()->cuda;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    char path[64], text[1024];
    ENTER();
    if (!name || !length)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t size = readlink(path, text, sizeof text - 1);
    if (size < 0)
        return errno == ENOENT ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NO_PERMISSION;
    text[size] = 0;
    snprintf(name, length, "%s", text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count) {
    ENTER();
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlUnitGetCount(unsigned int *count) {
    return nvmlGetExcludedDeviceCount(count);
}
