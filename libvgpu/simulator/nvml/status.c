/* Changing values: memory, load, clocks, power, temperature. Clocks, power and temperature follow the load. */
#include <string.h>

#include "nvml/library.h"

uint32_t device_share(nvmlDevice_t device) {
    uint64_t sampled;
    bool some;
    return sim_share(&library.sim, device->card, -1, 0, &sampled, &some);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER_DEVICE(device, memory);
    CHECK_VERSION(memory, nvmlMemory_v2);
    if (library.sim.profile->unified)
        return NVML_ERROR_NOT_SUPPORTED;
    memory->total = profile_of(device)->total;
    memory->reserved = profile_of(device)->reserved;
    memory->used = 0;
    for (int i = 0; i < (int)library.sim.state->card_count; i++)
        if (device->kind == DEVICE_BOARD || i == device->card)
            memory->used += sim_used(&library.sim, i);
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

/* Version 1 counts reserved memory as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t full = {.version = nvmlMemory_v2};
    ENTER_DEVICE(device, memory);
    nvmlReturn_t result = nvmlDeviceGetMemoryInfo_v2(device, &full);
    if (!result)
        *memory = (nvmlMemory_t){.total = full.total, .free = full.free, .used = full.used + full.reserved};
    return result;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    ENTER_DEVICE(device, memory);
    if (library.sim.profile->unified)
        return NVML_ERROR_NOT_SUPPORTED;
    *memory = (nvmlBAR1Memory_t){
        .bar1Total = library.sim.profile->bar1, .bar1Used = 1 << 20, .bar1Free = library.sim.profile->bar1 - (1 << 20)};
    return NVML_SUCCESS;
}

static unsigned percent(uint32_t share) {
    return (share + 5000) / 10000;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    ENTER_DEVICE(device, utilization);
    if (device->kind != DEVICE_CARD)
        return NVML_ERROR_NOT_SUPPORTED;                                      /* NVML: not under MIG */
    *utilization = (nvmlUtilization_t){.gpu = percent(device_share(device))}; /* simulated kernels touch no memory */
    return NVML_SUCCESS;
}

static nvmlReturn_t idle_engine(nvmlDevice_t device, unsigned int *utilization, unsigned int *period) {
    ENTER_DEVICE(device, utilization && period);
    *utilization = 0;
    *period = 1000000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *u, unsigned int *period) {
    return idle_engine(device, u, period);
}
nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *u, unsigned int *period) {
    return idle_engine(device, u, period);
}

static unsigned temperature_of(nvmlDevice_t device) {
    return (unsigned)library.sim.profile->temperature + percent(device_share(device)) * 35 / 100;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temperature) {
    ENTER_DEVICE(device, temperature);
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *temperature = temperature_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    ENTER_DEVICE(device, temperature);
    CHECK_VERSION(temperature, nvmlTemperature_v1);
    if (temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    temperature->temperature = (int)temperature_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                               unsigned int *temperature) {
    ENTER_DEVICE(device, temperature);
    if ((unsigned)threshold >= NVML_TEMPERATURE_THRESHOLD_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (threshold != NVML_TEMPERATURE_THRESHOLD_SHUTDOWN && threshold != NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        return NVML_ERROR_NOT_SUPPORTED;
    *temperature =
        (unsigned)(threshold == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? library.sim.profile->shutdown_temperature
                                                                    : library.sim.profile->slowdown_temperature);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    ENTER_DEVICE(device, milliwatts);
    const struct sim_profile *profile = library.sim.profile;
    *milliwatts =
        profile->idle_power_mw + (profile->power_mw - profile->idle_power_mw) / 100 * percent(device_share(device));
    return NVML_SUCCESS;
}

/* Energy since boot, estimated: idle power over the uptime, the rest while kernels ran. */
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    ENTER_DEVICE(device, millijoules);
    const struct sim_profile *profile = library.sim.profile;
    sim_advance(&library.sim, device->card);
    uint64_t busy_us = atomic_load(&library.sim.state->cards[device->card].busy_ns) / 1000, up_us = sim_now() / 1000;
    *millijoules = up_us / 1000 * profile->idle_power_mw / 1000 +
                   busy_us / 1000 * (profile->power_mw - profile->idle_power_mw) / 1000;
    return NVML_SUCCESS;
}

#define POWER(function, field)                                                                                         \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *milliwatts) {                                             \
        ENTER_DEVICE(device, milliwatts);                                                                              \
        *milliwatts = library.sim.profile->field;                                                                      \
        return NVML_SUCCESS;                                                                                           \
    }
POWER(nvmlDeviceGetPowerManagementLimit, power_mw)
POWER(nvmlDeviceGetPowerManagementDefaultLimit, power_mw)
POWER(nvmlDeviceGetEnforcedPowerLimit, power_mw)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *minimum,
                                                          unsigned int *maximum) {
    ENTER_DEVICE(device, minimum && maximum);
    *minimum = library.sim.profile->min_power_mw;
    *maximum = library.sim.profile->power_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
    ENTER_DEVICE(device, mode);
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz, bool maximum) {
    ENTER_DEVICE(device, mhz);
    const struct sim_profile *profile = library.sim.profile;
    bool full = maximum || device_share(device) > 0;
    switch (type) {
    case NVML_CLOCK_GRAPHICS:
    case NVML_CLOCK_SM: *mhz = (unsigned)(full ? profile->clock_mhz : profile->idle_clock_mhz); break;
    case NVML_CLOCK_MEM: *mhz = (unsigned)profile->memory_clock_mhz; break;
    case NVML_CLOCK_VIDEO: *mhz = (unsigned)(full ? profile->video_clock_mhz : profile->idle_clock_mhz); break;
    default: return NVML_ERROR_INVALID_ARGUMENT;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return clock_of(device, type, mhz, false);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return clock_of(device, type, mhz, true);
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return clock_of(device, type, mhz, true);
}

nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return clock_of(device, type, mhz, true);
}

nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return clock_of(device, type, mhz, true);
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *mhz) {
    return clock_of(device, type, mhz, id != NVML_CLOCK_ID_CURRENT);
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *mhz) {
    ENTER_DEVICE(device, count);
    return put_list(mhz, count, &(unsigned){(unsigned)library.sim.profile->memory_clock_mhz}, 1, sizeof *mhz);
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory, unsigned int *count,
                                                  unsigned int *mhz) {
    ENTER_DEVICE(device, count);
    if (memory != (unsigned)library.sim.profile->memory_clock_mhz)
        return NVML_ERROR_NOT_FOUND;
    unsigned clocks[] = {(unsigned)library.sim.profile->clock_mhz, (unsigned)library.sim.profile->idle_clock_mhz};
    return put_list(mhz, count, clocks, 2, sizeof *mhz);
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state) {
    ENTER_DEVICE(device, state);
    *state = NVML_PSTATE_0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *state) {
    return nvmlDeviceGetPerformanceState(device, state);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    ENTER_DEVICE(device, reasons);
    *reasons = device_share(device) ? nvmlClocksEventReasonNone : nvmlClocksEventReasonGpuIdle;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    ENTER_DEVICE(device, reasons);
    *reasons = nvmlClocksEventReasonGpuIdle;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return nvmlDeviceGetSupportedClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *kilobytes) {
    (void)counter;
    ENTER_DEVICE(device, kilobytes);
    *kilobytes = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *count) {
    ENTER_DEVICE(device, count);
    *count = 0; /* all simulated boards are cooled by the chassis; their fan speed is therefore not supported */
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last,
                                  nvmlValueType_t *value_type, unsigned int *count, nvmlSample_t *samples) {
    ENTER_DEVICE(device, value_type && count);
    if (type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_TOTAL_POWER_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlSample_t sample = {.timeStamp = sim_wall_us()};
    if (type == NVML_TOTAL_POWER_SAMPLES)
        nvmlDeviceGetPowerUsage(device, &sample.sampleValue.uiVal);
    else
        sample.sampleValue.uiVal = percent(device_share(device));
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (sample.timeStamp <= last)
        return NVML_ERROR_NOT_FOUND;
    if (!samples) {
        *count = 1;
        return NVML_SUCCESS;
    }
    return put_list(samples, count, &sample, 1, sizeof sample);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    ENTER_DEVICE(device, values && count > 0);
    for (int i = 0; i < count; i++) {
        nvmlFieldValue_t *value = &values[i];
        value->timestamp = (long long)sim_wall_us();
        value->latencyUsec = 0;
        value->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        switch (value->fieldId) {
        case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
            value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            value->nvmlReturn = nvmlDeviceGetTotalEnergyConsumption(device, &value->value.ullVal);
            break;
        case NVML_FI_DEV_NVLINK_LINK_COUNT:
            value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            value->value.uiVal = (unsigned)library.sim.profile->nvlinks;
            value->nvmlReturn = NVML_SUCCESS;
            break;
        case NVML_FI_DEV_POWER_INSTANT:
        case NVML_FI_DEV_POWER_AVERAGE:
            value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            value->nvmlReturn = nvmlDeviceGetPowerUsage(device, &value->value.uiVal);
            break;
        default: break;
        }
    }
    return NVML_SUCCESS;
}
