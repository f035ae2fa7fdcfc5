/* Finds the size of the memory behind an imported handle. No driver call reports it, but a mapping fails from one
 * granule beyond the end on. A driver that maps only whole blocks also refuses smaller mappings; then the size is known
 * only when the program maps the memory. */
#define _GNU_SOURCE
#include "hooks/imported.h"

#include "ledger/cards.h"
#include "reserves/capture.h"

/* Whether that many bytes of the memory can be mapped at a reserved address; unmaps them again. */
static bool reaches(CUmemGenericAllocationHandle handle, CUdeviceptr at, uint64_t bytes, CUresult *answer) {
    *answer = DRIVER(cuMemMap)(at, bytes, 0, handle, 0);
    return *answer == CUDA_SUCCESS && DRIVER(cuMemUnmap)(at, bytes) == CUDA_SUCCESS;
}

/* Number of granules of the memory; `most`: granules of the reserved range; `first`: the driver's answer to one
 * granule. */
static uint64_t granules(CUmemGenericAllocationHandle handle, CUdeviceptr at, uint64_t granule, uint64_t most,
                         CUresult *first) {
    uint64_t fit = 0, beyond = 1;
    CUresult answer;
    if (!reaches(handle, at, granule, first))
        return 0;
    while (beyond <= most && (beyond == 1 || reaches(handle, at, beyond * granule, &answer))) {
        fit = beyond;
        beyond *= 2;
    }
    if (beyond > most)
        beyond = most + 1;
    while (fit + 1 < beyond) {
        uint64_t middle = fit + (beyond - fit) / 2;
        if (reaches(handle, at, middle * granule, &answer))
            fit = middle;
        else
            beyond = middle;
    }
    return fit;
}

static enum vgpu_import look(CUmemGenericAllocationHandle handle, struct vgpu_imported *memory) {
    CUmemAllocationProp properties;
    size_t granule = 0, total = 0;
    CUdeviceptr at = 0;
    *memory = (struct vgpu_imported){0};
    if (!DRIVER(cuMemGetAllocationPropertiesFromHandle) || !DRIVER(cuMemGetAllocationGranularity) ||
        !DRIVER(cuMemAddressReserve) || !DRIVER(cuMemAddressFree) || !DRIVER(cuMemMap) || !DRIVER(cuMemUnmap) ||
        !DRIVER(cuDeviceTotalMem_v2))
        return VGPU_IMPORT_UNREADABLE;
    if (DRIVER(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) != CUDA_SUCCESS)
        return VGPU_IMPORT_UNREADABLE;
    memory->device = vgpu_device_of_location(&properties.location);
    if (memory->device == VGPU_NO_DEVICE)
        return VGPU_IMPORT_HOST;
    if (DRIVER(cuMemGetAllocationGranularity)(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) !=
            CUDA_SUCCESS ||
        !granule || DRIVER(cuDeviceTotalMem_v2)(&total, memory->device) != CUDA_SUCCESS)
        return VGPU_IMPORT_UNREADABLE;
    uint64_t most = (total + granule - 1) / granule;
    if (DRIVER(cuMemAddressReserve)(&at, most * granule, 0, 0, 0) != CUDA_SUCCESS)
        return VGPU_IMPORT_UNREADABLE;
    CUresult first;
    memory->bytes = granules(handle, at, granule, most, &first) * granule;
    DRIVER(cuMemAddressFree)(at, most * granule);
    if (memory->bytes)
        return VGPU_IMPORT_SIZED;
    /* another error, for example no memory for page tables now */
    return first == CUDA_ERROR_INVALID_VALUE ? VGPU_IMPORT_UNSIZED : VGPU_IMPORT_UNREADABLE;
}

enum vgpu_import vgpu_imported(CUmemGenericAllocationHandle handle, struct vgpu_imported *memory) {
    CUstreamCaptureMode mode = vgpu_relax();
    enum vgpu_import kind = look(handle, memory);
    vgpu_restore(mode);
    return kind;
}
