/* Which device is which, and its constant properties. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "nvml/library.h"

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER();
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned)library.count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
    return nvmlDeviceGetCount_v2(count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    ENTER();
    if (!device || index >= (unsigned)library.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &library.devices[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static const char *uuid_of(nvmlDevice_t device) {
    return device->kind == DEVICE_BOARD ? library.sim.state->board_uuid : library.sim.state->cards[device->card].uuid;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER();
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < library.handles; i++)
        if (strcasecmp(uuid_of(&library.devices[i]), uuid) == 0) {
            *device = &library.devices[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
    ENTER();
    unsigned domain, bus, slot, function = 0;
    if (!text || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
        domain = 0;
        if (sscanf(text, "%x:%x.%x", &bus, &slot, &function) < 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int i = 0; i < library.count; i++) {
        unsigned own_domain, own_bus;
        sim_pci_address(&library.sim, library.devices[i].card, &own_domain, &own_bus);
        if (own_domain == domain && own_bus == bus && !slot) {
            *device = &library.devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}

static void serial_of(nvmlDevice_t device, char out[32]) {
    unsigned long number = strtoul(uuid_of(device) + 4, NULL, 16); /* derived from the UUID */
    snprintf(out, 32, "165%010lu", number);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    char text[32];
    ENTER_DEVICE(device, serial);
    serial_of(device, text);
    return put_text(serial, length, text);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    ENTER();
    if (!serial || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < library.count; i++) {
        char text[32];
        serial_of(&library.devices[i], text);
        if (strcmp(text, serial) == 0) {
            *device = &library.devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    ENTER_DEVICE(device, uuid);
    return put_text(uuid, length, uuid_of(device));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    ENTER_DEVICE(device, name);
    return put_text(name, length, profile_of(device)->name);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    ENTER_DEVICE(device, index);
    *index = device->kind == DEVICE_INSTANCE ? (unsigned)(device - library.devices - 1)
                                             : (unsigned)(device - library.devices);
    return NVML_SUCCESS;
}

/* N of /dev/nvidiaN: the machine's number, even if a container sees only some cards. */
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    ENTER_DEVICE(device, minor);
    *minor = device->kind == DEVICE_CARD ? (unsigned)device->card : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER_DEVICE(device, pci);
    memset(pci, 0, sizeof *pci);
    sim_pci_address(&library.sim, device->card, &pci->domain, &pci->bus);
    pci->pciDeviceId = library.sim.profile->pci_device;
    pci->pciSubSystemId = library.sim.profile->pci_subsystem;
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", pci->domain & 0xffff, pci->bus & 0xff);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", pci->domain, pci->bus & 0xff);
    return NVML_SUCCESS;
}

/* Version 2 has the same fields up to the subsystem; version 1 ends before it. Neither has the long form of the
 * address. */
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlPciInfo_t full;
    ENTER_DEVICE(device, pci);
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &full);
    if (!result)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, busId));
    return result;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlPciInfo_t full;
    ENTER_DEVICE(device, pci);
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &full);
    if (!result)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, pciSubSystemId));
    return result;
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci) {
    nvmlPciInfo_t full;
    ENTER_DEVICE(device, pci);
    CHECK_VERSION(pci, nvmlPciInfoExt_v1);
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &full);
    if (result)
        return result;
    pci->domain = full.domain;
    pci->bus = full.bus;
    pci->device = 0;
    pci->pciDeviceId = full.pciDeviceId;
    pci->pciSubSystemId = full.pciSubSystemId;
    pci->baseClass = 3;
    pci->subClass = 2;
    memcpy(pci->busId, full.busId, sizeof pci->busId);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ENTER_DEVICE(device, major && minor);
    *major = library.sim.profile->major;
    *minor = library.sim.profile->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand) {
    ENTER_DEVICE(device, brand);
    *brand = (nvmlBrandType_t)library.sim.profile->brand;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length) {
    ENTER_DEVICE(device, version);
    return put_text(version, length, library.sim.profile->vbios);
}

nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number, unsigned int length) {
    ENTER_DEVICE(device, number);
    return put_text(number, length, library.sim.profile->part_number);
}

nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned int *board) {
    unsigned domain, bus;
    ENTER_DEVICE(device, board);
    sim_pci_address(&library.sim, device->card, &domain, &bus);
    *board = domain << 16 | bus << 8;
    return NVML_SUCCESS;
}

#define ANSWER(function, type, value)                                                                                  \
    nvmlReturn_t function(nvmlDevice_t device, type *out) {                                                            \
        ENTER_DEVICE(device, out);                                                                                     \
        *out = (type)(value);                                                                                          \
        return NVML_SUCCESS;                                                                                           \
    }
ANSWER(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, library.sim.profile->architecture)
ANSWER(nvmlDeviceGetNumGpuCores, unsigned int, library.sim.profile->cores)
ANSWER(nvmlDeviceGetMemoryBusWidth, unsigned int, library.sim.profile->bus_width)
ANSWER(nvmlDeviceGetMultiGpuBoard, unsigned int, 0)
ANSWER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, library.sim.profile->pcie_generation)
ANSWER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, library.sim.profile->pcie_generation)
ANSWER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, library.sim.profile->pcie_generation)
ANSWER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, library.sim.profile->pcie_width)
ANSWER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, library.sim.profile->pcie_width)
ANSWER(nvmlDeviceGetPcieReplayCounter, unsigned int, 0)
ANSWER(nvmlDeviceGetBusType, nvmlBusType_t, NVML_BUS_TYPE_PCIE)
ANSWER(nvmlDeviceGetPowerSource, nvmlPowerSource_t, NVML_POWER_SOURCE_AC)
ANSWER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
ANSWER(nvmlDeviceGetDisplayMode, nvmlEnableState_t, NVML_FEATURE_DISABLED)
ANSWER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, NVML_FEATURE_DISABLED)
ANSWER(nvmlDeviceGetAccountingMode, nvmlEnableState_t, NVML_FEATURE_DISABLED)
ANSWER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
ANSWER(nvmlDeviceGetRetiredPagesPendingStatus, nvmlEnableState_t, NVML_FEATURE_DISABLED)
ANSWER(nvmlDeviceGetVirtualizationMode, nvmlGpuVirtualizationMode_t, NVML_GPU_VIRTUALIZATION_MODE_NONE)
ANSWER(nvmlDeviceGetModuleId, unsigned int, device->card)
ANSWER(nvmlDeviceGetIrqNum, unsigned int, 64 + device->card)

nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version, unsigned int length) {
    ENTER_DEVICE(device, version);
    /* for example 2G183-A800-001: unique to the board */
    return put_text(version, length, library.sim.profile->part_number + 4);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
    ENTER_DEVICE(device, current && pending);
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
    ENTER_DEVICE(device, mode);
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *count) {
    (void)type, (void)counter;
    ENTER_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *count) {
    (void)location;
    return nvmlDeviceGetTotalEccErrors(device, type, counter, count);
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                       unsigned long long *addresses) {
    (void)cause, (void)addresses;
    ENTER_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

/* A card that can be partitioned is not partitioned, unless the profile is one of MIG instances. Other cards do not
 * know the mode. */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    ENTER_DEVICE(device, current && pending);
    if (!library.sim.profile->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    if (device->kind == DEVICE_INSTANCE)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = device->kind == DEVICE_BOARD ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    ENTER_DEVICE(device, count);
    *count = library.sim.profile->mig_capable ? 7 : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is) {
    ENTER_DEVICE(device, is);
    *is = device->kind == DEVICE_INSTANCE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    ENTER_DEVICE(device, mig);
    if (device->kind == DEVICE_BOARD && index < SIM_INSTANCES) {
        if ((int)index + 1 >= library.handles)
            return NVML_ERROR_NOT_FOUND;
        *mig = &library.devices[index + 1];
        return NVML_SUCCESS;
    }
    if (device->kind != DEVICE_CARD)
        return NVML_ERROR_INVALID_ARGUMENT;
    return library.sim.profile->mig_capable ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
    ENTER_DEVICE(mig, device);
    if (mig->kind != DEVICE_INSTANCE)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &library.devices[0];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    ENTER_DEVICE(device, id);
    if (device->kind != DEVICE_INSTANCE)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = instance_of(device->card);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    ENTER_DEVICE(device, id);
    if (device->kind != DEVICE_INSTANCE)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    ENTER_DEVICE(device, attributes);
    if (!library.sim.profile->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    *attributes = (nvmlDeviceAttributes_t){.multiprocessorCount = (unsigned)profile_of(device)->multiprocessors,
                                           .memorySizeMB = profile_of(device)->total >> 20};
    return NVML_SUCCESS;
}
