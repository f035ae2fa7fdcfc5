/* The boards that can be simulated. Figures: nvidia-smi -q -x of a T4 and of H100 SXM5 (driver 580/595), data sheets of the A100 boards;
 * context sizes as commonly seen with CUDA 12 (nvidia-smi of an idle context). Speed of memory: data sheets; of the bus: README. */
#include <stdlib.h>
#include <string.h>

#include "common/state.h"

#define MIB (1ull << 20)

/* brand and architecture: nvmlBrandType_t and nvmlDeviceArchitecture_t of nvml.h, which this file does without */
static const struct sim_profile profiles[] = {
    {.id = "T4", .name = "Tesla T4", .vbios = "90.04.96.00.02", .part_number = "900-2G183-A800-001",
     .total = 15360 * MIB, .reserved = 448 * MIB, .context_bytes = 105 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 6,
     .major = 7, .minor = 5, .multiprocessors = 40, .cores = 2560, .clock_mhz = 1590, .idle_clock_mhz = 300, .memory_clock_mhz = 5001,
     .video_clock_mhz = 1470, .bus_width = 256, .l2_bytes = 4 << 20, .shared_per_block_optin = 65536, .shared_per_multiprocessor = 65536,
     .threads_per_multiprocessor = 1024, .blocks_per_multiprocessor = 16, .pci_device = 0x1EB810DE, .pci_subsystem = 0x12A210DE,
     .first_bus = 0x18, .bus_step = 0x06, .power_mw = 70000, .idle_power_mw = 12000, .min_power_mw = 60000, .temperature = 33,
     .slowdown_temperature = 93, .shutdown_temperature = 96,
     .event_ns = 1100, .fills_take_sms = true, .memory_speed = 320000, .bus_speed = 12500,
     .pcie_generation = 3, .pcie_width = 16, .bar1 = 256 * MIB},
    {.id = "A100-40", .name = "NVIDIA A100-SXM4-40GB", .vbios = "92.00.45.00.03", .part_number = "692-2G506-0200-002",
     .total = 40960 * MIB, .reserved = 583 * MIB, .context_bytes = 430 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 7,
     .major = 8, .minor = 0, .multiprocessors = 108, .cores = 6912, .clock_mhz = 1410, .idle_clock_mhz = 210, .memory_clock_mhz = 1215,
     .video_clock_mhz = 1290, .bus_width = 5120, .l2_bytes = 40 << 20, .shared_per_block_optin = 166912, .shared_per_multiprocessor = 167936,
     .threads_per_multiprocessor = 2048, .blocks_per_multiprocessor = 32, .pci_device = 0x20B010DE, .pci_subsystem = 0x134710DE,
     .first_bus = 0x07, .bus_step = 0x0C, .power_mw = 400000, .idle_power_mw = 52000, .min_power_mw = 100000, .temperature = 33,
     .slowdown_temperature = 87, .shutdown_temperature = 92,
     .event_ns = 2500, .fills_take_sms = true, .memory_speed = 1555000, .bus_speed = 25000,
     .pcie_generation = 4, .pcie_width = 16, .nvlinks = 12, .nvlink_generation = 3,
     .bar1 = 65536 * MIB, .mig_capable = true},
    {.id = "A100-80", .name = "NVIDIA A100-SXM4-80GB", .vbios = "92.00.45.00.05", .part_number = "692-2G506-0212-002",
     .total = 81920 * MIB, .reserved = 870 * MIB, .context_bytes = 430 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 7,
     .major = 8, .minor = 0, .multiprocessors = 108, .cores = 6912, .clock_mhz = 1410, .idle_clock_mhz = 210, .memory_clock_mhz = 1593,
     .video_clock_mhz = 1290, .bus_width = 5120, .l2_bytes = 40 << 20, .shared_per_block_optin = 166912, .shared_per_multiprocessor = 167936,
     .threads_per_multiprocessor = 2048, .blocks_per_multiprocessor = 32, .pci_device = 0x20B210DE, .pci_subsystem = 0x147F10DE,
     .first_bus = 0x07, .bus_step = 0x0C, .power_mw = 400000, .idle_power_mw = 60000, .min_power_mw = 100000, .temperature = 33,
     .slowdown_temperature = 87, .shutdown_temperature = 92,
     .event_ns = 2500, .fills_take_sms = true, .memory_speed = 2039000, .bus_speed = 25000,
     .pcie_generation = 4, .pcie_width = 16, .nvlinks = 12, .nvlink_generation = 3,
     .bar1 = 131072 * MIB, .mig_capable = true},
    {.id = "H100", .name = "NVIDIA H100 80GB HBM3", .vbios = "96.00.99.00.01", .part_number = "692-2G520-0200-000",
     .total = 81559 * MIB, .reserved = 480 * MIB, .context_bytes = 520 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 9,
     .major = 9, .minor = 0, .multiprocessors = 132, .cores = 16896, .clock_mhz = 1980, .idle_clock_mhz = 345, .memory_clock_mhz = 2619,
     .video_clock_mhz = 1545, .bus_width = 5120, .l2_bytes = 50 << 20, .shared_per_block_optin = 232448, .shared_per_multiprocessor = 233472,
     .threads_per_multiprocessor = 2048, .blocks_per_multiprocessor = 32, .pci_device = 0x233010DE, .pci_subsystem = 0x16C110DE,
     .first_bus = 0x53, .bus_step = 0x11, .power_mw = 700000, .idle_power_mw = 68000, .min_power_mw = 200000, .temperature = 29,
     .slowdown_temperature = 87, .shutdown_temperature = 92,
     .event_ns = 2500, .fills_take_sms = true, .memory_speed = 3352000, .bus_speed = 55000,
     .pcie_generation = 5, .pcie_width = 16, .nvlinks = 18, .nvlink_generation = 4,
     .bar1 = 131072 * MIB, .mig_capable = true},
    /* seven of these are one board of "A100-40"; figures of the MIG user guide, memory of nvidia-smi */
    {.id = "A100-40-1g.5gb", .name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb", .vbios = "92.00.45.00.03", .part_number = "692-2G506-0200-002",
     .total = 4864 * MIB, .reserved = 0, .context_bytes = 430 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 7,
     .major = 8, .minor = 0, .multiprocessors = 14, .cores = 896, .clock_mhz = 1410, .idle_clock_mhz = 210, .memory_clock_mhz = 1215,
     .video_clock_mhz = 1290, .bus_width = 5120, .l2_bytes = 5 << 20, .shared_per_block_optin = 166912, .shared_per_multiprocessor = 167936,
     .threads_per_multiprocessor = 2048, .blocks_per_multiprocessor = 32, .pci_device = 0x20B010DE, .pci_subsystem = 0x134710DE,
     .first_bus = 0x07, .bus_step = 0x0C, .power_mw = 400000, .idle_power_mw = 52000, .min_power_mw = 100000, .temperature = 33,
     .slowdown_temperature = 87, .shutdown_temperature = 92,
     .event_ns = 2500, .fills_take_sms = true, .memory_speed = 194000, .bus_speed = 25000,
     .pcie_generation = 4, .pcie_width = 16, .bar1 = 65536 * MIB,
     .mig_capable = true, .mig = "1g.5gb", .board = 1},
    /* memory is the machine's own: CUDA counts it, NVML does not support the question. SMs, cores and memory of the data sheet; identifiers,
     * clocks and temperatures are only plausible */
    {.id = "GB10", .name = "NVIDIA GB10", .vbios = "9A.0B.18.00.00", .part_number = "900-2G1E8-0000-000",
     .total = 122572 * MIB, .reserved = 0, .context_bytes = 320 * MIB, .module_bytes = 2 * MIB, .brand = 14, .architecture = 10,
     .major = 12, .minor = 1, .multiprocessors = 48, .cores = 6144, .clock_mhz = 2418, .idle_clock_mhz = 208, .memory_clock_mhz = 4266,
     .video_clock_mhz = 2418, .bus_width = 256, .l2_bytes = 24 << 20, .shared_per_block_optin = 101376, .shared_per_multiprocessor = 102400,
     .threads_per_multiprocessor = 1536, .blocks_per_multiprocessor = 24, .pci_device = 0x2E1210DE, .pci_subsystem = 0x000010DE,
     .first_bus = 0x0F, .bus_step = 0x01, .power_mw = 140000, .idle_power_mw = 5000, .min_power_mw = 40000, .temperature = 38,
     .slowdown_temperature = 95, .shutdown_temperature = 100,
     .event_ns = 2500, .fills_take_sms = true, .memory_speed = 273000,
     .pcie_generation = 5, .pcie_width = 1, .unified = true},
};
#define PROFILES (sizeof profiles / sizeof *profiles)

const struct sim_profile *sim_profile_at(uint32_t index)
{
    return index < PROFILES ? &profiles[index] : NULL;
}

uint64_t sim_usable(const struct sim_profile *profile)
{
    return profile->total - profile->reserved;
}

int sim_spec_parse(const char *spec, uint32_t *cards)
{
    size_t end_of_spec = strcspn(spec, "@");
    if (!sim_driver_of_spec(spec))
        return -1;
    for (uint32_t i = 0; i < PROFILES; i++) {
        size_t length = strlen(profiles[i].id);
        if (strncmp(spec, profiles[i].id, length) != 0)
            continue;
        const char *rest = spec + length;
        if (rest == spec + end_of_spec) {
            *cards = 1;
            return (int)i;
        }
        if (*rest != 'x' || rest[1] < '1' || rest[1] > '9')
            continue;
        char *end;
        unsigned long count = strtoul(rest + 1, &end, 10);
        if (end != spec + end_of_spec || count > (profiles[i].mig ? SIM_INSTANCES : SIM_CARDS))
            continue;
        *cards = (uint32_t)count;
        return (int)i;
    }
    return -1;
}

const char *vgpu_sim_profiles(void)
{
    return "T4,A100-40,A100-80,H100,GB10,A100-40-1g.5gb";
}
