/* A libcuda.so.1 of which the simulated driver has no like: it does what newer drivers do, and tells the program when
 * it is at work, so that a test can do then what another thread might. Not for more than one thread of allocations. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#ifdef WITHOUT_POOL_OF_CHOICE
#undef cuMemAllocFromPoolAsync
#define cuMemAllocFromPoolAsync another_name
#endif

#define TOTAL (UINT64_C(8) << 30)
#define MOST 64

/* Called with the name of an entry point: as it begins, and once more (`after`) when its answer stands where the
 * program wants it. */
API void (*other_meanwhile)(const char *entry, int after);
API uint64_t other_held; /* bytes of the card that are in use */

static void meanwhile(const char *entry, int after) {
    if (other_meanwhile)
        other_meanwhile(entry, after);
}

/* Everything that holds memory; its number + 1, times 4096, is its address or handle. */
static struct {
    uint64_t bytes;
    int references;
    uintptr_t array;   /* into which it is mapped */
    CUmemoryPool pool; /* of which it is `used` bytes */
    uint64_t used;
} things[MOST];
static unsigned count;
static int capturing;

static uintptr_t make(uint64_t bytes) {
    things[count].bytes = bytes;
    things[count].references = 1;
    other_held += bytes;
    return (uintptr_t)++count << 12;
}

static CUresult let_go(uintptr_t handle) {
    const uintptr_t index = (handle >> 12) - 1;
    if (index >= count || handle & 4095 || !things[index].references)
        return CUDA_ERROR_INVALID_VALUE;
    if (--things[index].references == 0)
        other_held -= things[index].bytes;
    return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUcontext current_context = (CUcontext)4096;
API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current_context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
    current_context = context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return current_context ? CUDA_ERROR_NOT_SUPPORTED : cuCtxSetCurrent(context);
}
API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current_context;
    return cuCtxSetCurrent(NULL);
}
API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return current_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* The heap of malloc, which it makes a multiple of 4 MiB. No attribute of the device is known. */
static size_t heap = 8 << 20;

API CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    meanwhile("cuCtxSetLimit", 0);
    if (limit == CU_LIMIT_MALLOC_HEAP_SIZE)
        heap = (value + (4 << 20) - 1) & ~(size_t)((4 << 20) - 1);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = limit == CU_LIMIT_MALLOC_HEAP_SIZE ? heap : 0;
    return CUDA_SUCCESS;
}

/* There is one stream. */
API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = (CUcontext)4096;
    return stream == (CUstream)16 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API CUresult cuStreamDestroy_v2(CUstream stream) {
    meanwhile("cuStreamDestroy", 0);
    capturing = 0;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuCtxDestroy_v2(CUcontext context) {
    meanwhile("cuCtxDestroy", 0);
    capturing = 0;
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API int other_retained; /* not 0: the primary context is active, by whatever way */
#define retained other_retained

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    meanwhile("cuDevicePrimaryCtxRetain", 0);
    retained += !device;
    *context = (CUcontext)4096;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    meanwhile("cuDevicePrimaryCtxRelease", 0);
    retained -= !device;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    if (!device) {
        for (unsigned i = 0; i < count; i++)
            things[i].references = 0;
        retained = 0;
        other_held = 0;
    }
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained > 0;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

/* Kernels take 0.1 ms, and have ended when they are launched. */
API uint64_t other_events; /* how many there are */

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    *event = (CUevent)(uintptr_t)(++other_events << 12);
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
    other_events--;
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    (void)stream;
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API CUresult cuEventQuery(CUevent event) {
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
    *ms = 0.1f;
    return from && to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra) {
    (void)x, (void)y, (void)z, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters, (void)extra;
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid, 7, sizeof *uuid);
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = TOTAL - other_held;
    *total = TOTAL;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    meanwhile("cuMemAlloc", 0);
    *pointer = make(bytes);
    meanwhile("cuMemAlloc", 1);
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    *pointer = make(*pitch * height);
    meanwhile("cuMemAllocPitch", 1);
    return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    return let_go(pointer);
}

API CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    meanwhile("cuArray3DCreate", 0);
    const unsigned texel = d->Format == CU_AD_FORMAT_Y416 ? 8 : 1;
    *array = (CUarray)make(d->Flags & CUDA_ARRAY3D_SPARSE ? 0 : d->Width * (d->Height ? d->Height : 1) * texel);
    return CUDA_SUCCESS;
}

API CUresult cuArrayDestroy(CUarray array) {
    for (unsigned i = 0; i < count; i++)
        if (things[i].array == (uintptr_t)array) {
            things[i].array = 0;
            let_go((uintptr_t)(i + 1) << 12);
        }
    return let_go((uintptr_t)array);
}

API CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    meanwhile("cuImportExternalMemory", 0);
    *memory = (CUexternalMemory)make(description->size);
    return CUDA_SUCCESS;
}

API CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    return let_go((uintptr_t)memory);
}

static bool on_card(const CUmemLocation *location) {
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE || (unsigned)location->type > 4; /* 6: a locality domain */
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags) {
    (void)flags;
    meanwhile("cuMemCreate", 0);
    *handle = make(on_card(&properties->location) ? bytes : 0);
    meanwhile("cuMemCreate", 1);
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return let_go(handle);
}

API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long flags) {
    (void)handle, (void)type, (void)flags;
    *(int *)shareable = memfd_create("block", MFD_CLOEXEC);
    meanwhile("cuMemExportToShareableHandle", 1);
    return CUDA_SUCCESS;
}

API CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned length, CUstream stream) {
    (void)stream;
    for (unsigned i = 0; i < length; i++) {
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_UNMAP) {
            for (unsigned j = 0; j < count; j++)
                if (things[j].array == (uintptr_t)list[i].resource.array) {
                    things[j].array = 0;
                    let_go((uintptr_t)(j + 1) << 12);
                }
        } else {
            const uintptr_t index = (list[i].memHandle.memHandle >> 12) - 1;
            things[index].references++;
            things[index].array = (uintptr_t)list[i].resource.array;
        }
    }
    return CUDA_SUCCESS;
}

/* One logical endpoint, to which one block at a time is bound. */
static CUmemGenericAllocationHandle endpoint;

API CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset,
                                      CUmemGenericAllocationHandle handle, cuuint64_t start, cuuint64_t size,
                                      unsigned long long flags) {
    (void)id, (void)device, (void)offset, (void)start, (void)size, (void)flags;
    endpoint = handle;
    things[(handle >> 12) - 1].references++;
    return CUDA_SUCCESS;
}

API CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, cuuint64_t size) {
    (void)id, (void)device, (void)offset, (void)size;
    return let_go(endpoint);
}

API CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId id) {
    return id == 7 ? let_go(endpoint) : CUDA_ERROR_INVALID_VALUE;
}

/* Pools reserve what is allocated, and keep it. */
static struct CUmemPoolHandle_st {
    CUmemPoolProps properties;
    uint64_t reserved, used;
} pools[MOST] = {
    {.properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}}},
    {.properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_HOST}}}};
static unsigned pool_count = 2;
static CUmemoryPool current = pools;

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    meanwhile("cuMemPoolCreate", 0);
    *pool = &pools[pool_count++];
    (*pool)->properties = *properties;
    meanwhile("cuMemPoolCreate", 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    *pool = current;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    current = pool;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
API CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    (void)type;
    *pool = &pools[location->type == CU_MEM_LOCATION_TYPE_HOST];
    return CUDA_SUCCESS;
}

/* Type and number that it says of the place of every pool; a negative type: as it is. */
API int other_location[2] = {-1};

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    meanwhile("cuMemPoolGetAttribute", 0);
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool->reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; break;
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE: *(int *)value = pool->properties.allocType; break;
    case CU_MEMPOOL_ATTR_LOCATION_TYPE:
        *(int *)value = other_location[0] < 0 ? (int)pool->properties.location.type : other_location[0];
        break;
    case CU_MEMPOOL_ATTR_LOCATION_ID:
        *(int *)value = other_location[0] < 0 ? pool->properties.location.id : other_location[1];
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)stream;
    meanwhile("cuMemAllocAsync", 0);
    if (capturing) {
        *pointer = make(0);
        return CUDA_SUCCESS;
    }
    pool->used += bytes;
    if (pool->used > pool->reserved) {
        if (on_card(&pool->properties.location) || pool->properties.allocType == 2) /* managed */
            other_held += pool->used - pool->reserved;
        pool->reserved = pool->used;
    }
    *pointer = make(0);
    things[count - 1].pool = pool;
    things[count - 1].used = bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    (void)stream;
    const CUresult result = let_go(pointer);
    if (result == CUDA_SUCCESS && things[(pointer >> 12) - 1].pool)
        things[(pointer >> 12) - 1].pool->used -= things[(pointer >> 12) - 1].used;
    return result;
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    meanwhile("cuMemAllocAsync", 0);
    void (*const told)(const char *, int) = other_meanwhile;
    other_meanwhile = NULL;
    const CUresult result = cuMemAllocFromPoolAsync(pointer, bytes, current, stream);
    other_meanwhile = told;
    return result;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    (void)stream, (void)mode;
    capturing = 1;
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    (void)stream;
    *graph = NULL;
    capturing = 0;
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

/* Which no symbol leads to. */
static CUresult allocate(CUdeviceptr *pointer, size_t bytes) {
    return cuMemAlloc_v2(pointer, bytes);
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status) {
    (void)flags;
    *function = strcmp(name, "cuMemAlloc") == 0 && version >= 3020 ? (void *)allocate : NULL;
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    meanwhile("cuGetProcAddress", 1);
    return CUDA_SUCCESS;
}
