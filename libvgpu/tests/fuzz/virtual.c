/* Blocks that are made apart from addresses. */
#define _GNU_SOURCE
#include "handles.h"

CUresult virtual(struct operation op, unsigned which) {
    static const CUmemLocationType places[] = {CU_MEM_LOCATION_TYPE_DEVICE,    CU_MEM_LOCATION_TYPE_DEVICE,
                                               CU_MEM_LOCATION_TYPE_DEVICE,    CU_MEM_LOCATION_TYPE_HOST,
                                               CU_MEM_LOCATION_TYPE_HOST_NUMA, CU_MEM_LOCATION_TYPE_INVALID};
    CUmemAllocationProp properties = {.type =
                                          op.c >= 250 ? CU_MEM_ALLOCATION_TYPE_INVALID : CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = places[op.c % 6u], .id = (op.c >> 3) % (DEVICES + 1)}};
    CUmemGenericAllocationHandle handle = handle_of(PHYSICAL, op.a);
    CUdeviceptr base = handle_of(RANGE, op.b % 8u);
    CUdeviceptr at = base + (uint64_t)(op.c % 8u) * GRANULE;
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, {op.a % DEVICES}},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result;
    switch (which) {
    case 0:
        result = cuMemCreate(op.c == 249 ? NULL : &handle, op.b == 252 ? bytes_of(134, op.c >> 3) : granules(op.b),
                             &properties, op.c == 248);
        if (result == CUDA_SUCCESS)
            made(PHYSICAL, op.a % 16u, handle, 0);
        return result;
    case 1: return cuMemRelease(handle_of(PHYSICAL, op.a < 250 ? op.a % 16u : op.a));
    case 2:
        result = cuMemAddressReserve(&base, granules(op.a), 0, 0, 0);
        if (result == CUDA_SUCCESS)
            made(RANGE, op.b % 8u, base, granules(op.a));
        return result;
    case 3:
        return cuMemMap(at, granules(op.c >> 3), op.c == 255, handle_of(PHYSICAL, op.a < 250 ? op.a % 16u : op.a), 0);
    case 4: return cuMemUnmap(at, op.a >= 128 ? size_of_range(base) : granules(op.a));
    case 5:
        result = cuMemRetainAllocationHandle(op.c == 255 ? NULL : &handle, (void *)(at + (op.c >= 128 ? 4096 : 0)));
        if (result == CUDA_SUCCESS)
            made(PHYSICAL, op.a % 16u, handle, 0);
        return result;
    case 6: return cuMemAddressFree(base, size_of_range(base));
    default: return cuMemSetAccess(at, granules(op.b), &access, op.c != 255);
    }
}
