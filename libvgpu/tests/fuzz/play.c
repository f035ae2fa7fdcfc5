#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL /* every version of every entry point under its own symbol */
#include "play.h"

#include <cuda.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILD_PATIENCE_S 20
#define GRANULE (2 * MIB)

/* Handles by kind. A slot keeps its handle after the end of what it names, so that it can be used once too often; the logs forget nothing. */
enum kind { POINTER, PHYSICAL, RANGE, ARRAY, MIPMAP, POOL, STREAM, CONTEXT, GRAPH, EXEC, HOST, KINDS };
#define SLOTS 32u
static _Atomic uint64_t slots[KINDS][SLOTS];
static struct {
    _Atomic unsigned count;
    uint64_t handle[MAX_OPERATIONS * 4];
    uint64_t size[MAX_OPERATIONS * 4];
} logs[KINDS];
static atomic_bool pools_used, graph_memory;
static bool concurrent;
static pthread_rwlock_t rules = PTHREAD_RWLOCK_INITIALIZER; /* destroying what another thread uses is no program at all */

static void made(enum kind kind, unsigned slot, uint64_t handle, uint64_t size) {
    unsigned at = atomic_fetch_add(&logs[kind].count, 1);
    if (at < sizeof logs[kind].handle / sizeof *logs[kind].handle) {
        logs[kind].handle[at] = handle;
        logs[kind].size[at] = size;
    }
    atomic_store(&slots[kind][slot % SLOTS], handle);
}

static uint64_t handle_of(enum kind kind, unsigned slot) {
    if (slot >= 250)
        return slot == 250 ? 0 : slot == 251 ? 0xdead000 : slot == 252 ? UINT64_MAX : (uint64_t)(uintptr_t)&slots;
    return atomic_load(&slots[kind][slot % SLOTS]);
}

static uint64_t size_of_range(uint64_t base) {
    unsigned count = atomic_load(&logs[RANGE].count);
    for (unsigned i = 0; i < count; i++)
        if (logs[RANGE].handle[i] == base)
            return logs[RANGE].size[i];
    return GRANULE;
}

static uint64_t bytes_of(uint8_t code, unsigned card) {
    static const uint64_t fixed[] = {1, 511, 512, 4096, MIB - 1, MIB, 2 * MIB, 2 * MIB + 1, 3 * MIB, 10 * MIB, 31 * MIB, 32 * MIB,
                                     32 * MIB + 1, 33 * MIB, 64 * MIB, 100 * MIB, UINT64_C(1) << 32, UINT64_C(1) << 40,
                                     UINT64_C(1) << 63, UINT64_MAX, UINT64_MAX - 511, 0, 0xffffffff};
    if (code < 128)
        return (uint64_t)(code + 1) << 12;
    card %= LIMITED;
    switch (code) {
    case 128: return world_limit(card);
    case 129: return world_limit(card) + 1;
    case 130: return world_limit(card) / 2;
    case 131: return world_left(card);
    case 132: return world_left(card) + 1;
    case 133: return world_left(card) / 2;
    case 134: return world_left(card) & ~(GRANULE - 1);
    default: return fixed[code % (sizeof fixed / sizeof *fixed)];
    }
}

static uint64_t granules(uint8_t code) {
    return code == 255 ? 12345 : code == 254 ? 0 : code == 253 ? UINT64_C(1) << 42 : (uint64_t)(code % 16 + 1) * GRANULE;
}

static CUstream stream_of(uint8_t code) {
    switch (code % 8) {
    case 0: case 1: return NULL;
    case 2: return CU_STREAM_LEGACY;
    case 3: return CU_STREAM_PER_THREAD;
    default: return (CUstream)handle_of(STREAM, code >= 250 ? code : code % 4u);
    }
}

static unsigned card_here(void) {
    CUdevice device = 0;
    return cuCtxGetDevice(&device) == CUDA_SUCCESS ? (unsigned)device : 0;
}

/* `pointer` is read after the call that writes it. */
static CUresult keep_pointer(CUresult result, unsigned slot, const CUdeviceptr *pointer) {
    if (result == CUDA_SUCCESS)
        made(POINTER, slot, *pointer, 0);
    return result;
}

static CUresult looked_up(const char *name, int version, void **function) {
    CUdriverProcAddressQueryResult status;
    CUresult result = cuGetProcAddress_v2(name, function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    return result != CUDA_SUCCESS ? result : *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static CUresult allocate(struct operation op, bool looked) {
    CUdeviceptr pointer = 0;
    uint64_t bytes = bytes_of(op.b, card_here());
    if (op.c == 255)
        return cuMemAlloc_v2(NULL, bytes);
    if (!looked)
        return keep_pointer(cuMemAlloc_v2(&pointer, bytes), op.a, &pointer);
    void *function = NULL;
    CUresult result = looked_up("cuMemAlloc", op.c & 1 ? 12000 : 3020, &function);
    return result ? result : keep_pointer(((CUresult (*)(CUdeviceptr *, size_t))function)(&pointer, bytes), op.a, &pointer);
}

static CUresult allocate_other(struct operation op, unsigned which) {
    CUdeviceptr pointer = 0;
    CUdeviceptr_v1 narrow = 0;
    size_t pitch = 0;
    uint64_t bytes = bytes_of(op.b, card_here());
    switch (which) {
    case 0: return cuMemAlloc(&narrow, (unsigned)bytes);
    case 1:
        if (op.c >= 250)
            return cuMemAllocPitch_v2(op.c & 1 ? NULL : &pointer, op.c & 1 ? &pitch : NULL, bytes, 3, 4);
        return keep_pointer(cuMemAllocPitch_v2(&pointer, &pitch, bytes, op.c % 9u, 4u << (op.c >> 4) % 4), op.a, &pointer);
    default: return keep_pointer(cuMemAllocManaged(op.c == 255 ? NULL : &pointer, bytes, op.c % 4u), op.a, &pointer);
    }
}

static CUresult allocate_ordered(struct operation op, unsigned which) {
    CUdeviceptr pointer = 0;
    CUstream stream = stream_of(op.c);
    uint64_t bytes = bytes_of(op.b, card_here());
    CUmemoryPool pool = (CUmemoryPool)handle_of(POOL, op.c >= 240 ? op.b | 250u : op.a % 4u);
    CUdeviceptr *out = op.c == 255 ? NULL : &pointer;
    atomic_store(&pools_used, true);
    CUresult result = which == 0   ? cuMemAllocAsync(out, bytes, stream)
                      : which == 1 ? cuMemAllocAsync_ptsz(out, bytes, stream)
                      : which == 2 ? cuMemAllocFromPoolAsync(out, bytes, pool, stream)
                                   : cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (result == CUDA_SUCCESS && cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        atomic_store(&graph_memory, true);
    return keep_pointer(result, op.a, &pointer);
}

static CUresult free_pointer(struct operation op, unsigned which) {
    CUdeviceptr pointer = handle_of(POINTER, op.a);
    if (concurrent && op.a < 250) /* a second free beside other threads may hit a block that one of them was just given */
        pointer = atomic_exchange(&slots[POINTER][op.a % SLOTS], 0);
    if (op.b >= 250)
        pointer = handle_of(op.b == 250 ? HOST : op.b == 251 ? ARRAY : op.b == 252 ? RANGE : PHYSICAL, op.a);
    else if (op.b >= 240)
        pointer += 512; /* inside a block */
    void *function = NULL;
    CUresult result;
    switch (which) {
    case 0: return cuMemFree_v2(pointer);
    case 1: return cuMemFreeAsync(pointer, stream_of(op.c));
    case 2: return cuMemFreeAsync_ptsz(pointer, stream_of(op.c));
    case 3: return cuMemFree((CUdeviceptr_v1)pointer);
    default:
        result = looked_up("cuMemFree", 12000, &function);
        return result ? result : ((CUresult (*)(CUdeviceptr))function)(pointer);
    }
}

static CUresult virtual(struct operation op, unsigned which) {
    static const CUmemLocationType places[] = {CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE,
                                               CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA, CU_MEM_LOCATION_TYPE_INVALID};
    CUmemAllocationProp properties = {.type = op.c >= 250 ? CU_MEM_ALLOCATION_TYPE_INVALID : CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = places[op.c % 6u], .id = (op.c >> 3) % (DEVICES + 1)}};
    CUmemGenericAllocationHandle handle = handle_of(PHYSICAL, op.a);
    CUdeviceptr base = handle_of(RANGE, op.b % 8u);
    CUdeviceptr at = base + (uint64_t)(op.c % 8u) * GRANULE;
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, {op.a % DEVICES}}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result;
    switch (which) {
    case 0:
        result = cuMemCreate(op.c == 249 ? NULL : &handle, op.b == 252 ? bytes_of(134, op.c >> 3) : granules(op.b), &properties, op.c == 248);
        if (result == CUDA_SUCCESS)
            made(PHYSICAL, op.a % 16u, handle, 0);
        return result;
    case 1: return cuMemRelease(handle_of(PHYSICAL, op.a < 250 ? op.a % 16u : op.a));
    case 2:
        result = cuMemAddressReserve(&base, granules(op.a), 0, 0, 0);
        if (result == CUDA_SUCCESS)
            made(RANGE, op.b % 8u, base, granules(op.a));
        return result;
    case 3: return cuMemMap(at, granules(op.c >> 3), op.c == 255, handle_of(PHYSICAL, op.a < 250 ? op.a % 16u : op.a), 0);
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

static CUresult array(struct operation op, unsigned which) {
    static const CUarray_format formats[] = {CU_AD_FORMAT_UNSIGNED_INT8, CU_AD_FORMAT_HALF, CU_AD_FORMAT_FLOAT, CU_AD_FORMAT_SIGNED_INT32,
                                             CU_AD_FORMAT_BC1_UNORM, CU_AD_FORMAT_NV12, (CUarray_format)0x77};
    static const unsigned flags[] = {0, 0, CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_CUBEMAP, CUDA_ARRAY3D_SURFACE_LDST, CUDA_ARRAY3D_SPARSE,
                                     CUDA_ARRAY3D_DEFERRED_MAPPING};
    size_t width = op.b == 255 ? SIZE_MAX / 2 : op.b * 97u, height = (op.c & 15) * 61u, depth = op.c >> 6 ? 6u * (op.c >> 6) : 0;
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = width, .Height = height, .Depth = depth, .Format = formats[op.c % 7u],
                                    .NumChannels = 1u << (op.b % 4u), .Flags = flags[(op.c >> 2) % 7u]};
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = width, .Height = height, .Format = full.Format, .NumChannels = full.NumChannels};
    CUDA_ARRAY3D_DESCRIPTOR_v1 full1 = {.Width = (unsigned)width, .Height = (unsigned)height, .Depth = (unsigned)depth, .Format = full.Format,
                                        .NumChannels = full.NumChannels, .Flags = full.Flags};
    CUDA_ARRAY_DESCRIPTOR_v1 flat1 = {.Width = (unsigned)width, .Height = (unsigned)height, .Format = full.Format, .NumChannels = full.NumChannels};
    CUarray made_array = NULL;
    CUmipmappedArray mipmap = NULL;
    CUresult result;
    switch (which) {
    case 0: result = cuArrayCreate_v2(op.c == 255 ? NULL : &made_array, op.c == 254 ? NULL : &flat); break;
    case 1: result = cuArrayCreate(&made_array, op.c == 254 ? NULL : &flat1); break;
    case 2: result = cuArray3DCreate_v2(&made_array, op.c == 254 ? NULL : &full); break;
    case 3: result = cuArray3DCreate(op.c == 255 ? NULL : &made_array, &full1); break;
    case 4:
        result = cuMipmappedArrayCreate(op.c == 255 ? NULL : &mipmap, &full, op.a % 12u);
        if (result == CUDA_SUCCESS) {
            made(MIPMAP, op.a % 8u, (uintptr_t)mipmap, 0);
            if (cuMipmappedArrayGetLevel(&made_array, mipmap, 0) == CUDA_SUCCESS && op.a >= 128)
                atomic_store(&slots[ARRAY][op.a % 8u], (uintptr_t)made_array); /* no array to be destroyed */
        }
        return result;
    case 5: return cuArrayDestroy((CUarray)handle_of(ARRAY, op.a < 250 ? op.a % 8u : op.a));
    default: return cuMipmappedArrayDestroy((CUmipmappedArray)handle_of(MIPMAP, op.a < 250 ? op.a % 8u : op.a));
    }
    if (result == CUDA_SUCCESS)
        made(ARRAY, op.a % 8u, (uintptr_t)made_array, 0);
    return result;
}

static CUresult pool(struct operation op, unsigned which) {
    CUmemPoolProps properties = {.allocType = op.c == 255 ? CU_MEM_ALLOCATION_TYPE_INVALID : CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {op.c == 254 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE, {op.b % (DEVICES + 1)}},
                                 .maxSize = op.c % 4u == 3 ? (op.c >> 2) * MIB : 0};
    CUmemoryPool handle = (CUmemoryPool)handle_of(POOL, op.a < 250 ? op.a % 4u : op.a), created = NULL;
    cuuint64_t threshold = op.b & 1 ? UINT64_MAX : (uint64_t)(op.b / 2) * MIB;
    CUdevice device = op.b % (DEVICES + 1);
    CUresult result;
    atomic_store(&pools_used, true);
    switch (which) {
    case 0:
        result = cuMemPoolCreate(op.c == 253 ? NULL : &created, op.c == 252 ? NULL : &properties);
        if (result == CUDA_SUCCESS)
            made(POOL, op.a % 4u, (uintptr_t)created, 0);
        return result;
    case 1: return cuMemPoolDestroy(handle);
    case 2: return cuMemPoolTrimTo(handle, op.b >= 128 ? 0 : op.b * MIB);
    case 3: return cuMemPoolSetAttribute(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, op.c == 255 ? NULL : &threshold);
    case 4: return cuDeviceSetMemPool(device, handle);
    default:
        result = op.c & 1 ? cuDeviceGetMemPool(&created, device) : cuDeviceGetDefaultMemPool(&created, device);
        if (result == CUDA_SUCCESS)
            atomic_store(&slots[POOL][op.a % 4u], (uintptr_t)created); /* not ours to destroy: the driver refuses it */
        return result;
    }
}

static CUresult stream(struct operation op, unsigned which) {
    CUstream created = NULL;
    CUcontext context;
    CUresult result;
    switch (which) {
    case 0:
        result = cuStreamCreate(op.c == 255 ? NULL : &created, op.b % 2u);
        if (result == CUDA_SUCCESS)
            made(STREAM, op.a % 4u, (uintptr_t)created, 0);
        return result;
    case 1: return cuStreamDestroy_v2((CUstream)handle_of(STREAM, op.a < 250 ? op.a % 4u : op.a));
    case 2: return op.b & 1 ? cuStreamSynchronize(stream_of(op.c)) : cuCtxGetCurrent(&context) || !context ? CUDA_SUCCESS : cuCtxSynchronize();
    default: return cuMemsetD8Async(handle_of(POINTER, op.a), op.b, 64, stream_of(op.c));
    }
}

static CUresult capture(struct operation op, unsigned which) {
    CUgraph graph = (CUgraph)handle_of(GRAPH, op.a < 250 ? op.a % 4u : op.a);
    CUgraphExec exec = (CUgraphExec)handle_of(EXEC, op.a < 250 ? op.a % 4u : op.a);
    CUstreamCaptureMode mode = (CUstreamCaptureMode)(op.b % 4u);
    CUresult result;
    switch (which) {
    case 0: return op.b >= 250 ? cuStreamBeginCapture(stream_of(op.c)) : cuStreamBeginCapture_v2(stream_of(op.c), mode);
    case 1:
        result = cuStreamEndCapture(stream_of(op.c), op.b == 255 ? NULL : &graph);
        if (result == CUDA_SUCCESS)
            made(GRAPH, op.a % 4u, (uintptr_t)graph, 0);
        return result;
    case 2: return cuThreadExchangeStreamCaptureMode(op.b == 255 ? NULL : &mode);
    case 3:
        result = cuGraphInstantiateWithFlags(&exec, graph, 0);
        if (result == CUDA_SUCCESS)
            made(EXEC, op.a % 4u, (uintptr_t)exec, 0);
        return result;
    case 4: /* memory that a graph's launch takes is not charged */
        if (atomic_load(&graph_memory))
            return CUDA_SUCCESS;
        return op.b & 1 ? cuGraphLaunch(exec, stream_of(op.c)) : cuGraphLaunch_ptsz(exec, stream_of(op.c));
    case 5: return cuGraphDestroy(graph);
    default: return cuGraphExecDestroy(exec);
    }
}

static CUresult keep_context(CUresult result, unsigned slot, const CUcontext *context) {
    if (result == CUDA_SUCCESS)
        made(CONTEXT, slot % 4u, (uintptr_t)*context, 0);
    return result;
}

static CUresult context(struct operation op, unsigned which) {
    CUdevice device = op.b >= 250 ? (CUdevice)op.b : op.b % (DEVICES + 1);
    CUcontext handle = (CUcontext)handle_of(CONTEXT, op.a < 250 ? op.a % 4u : op.a);
    CUcontext *out = op.c == 255 ? NULL : &handle;
    CUresult result;
    switch (which) {
    case 0: return keep_context(op.c & 1 ? cuCtxCreate_v2(out, 0, device) : cuCtxCreate(out, 0, device), op.a, &handle);
    case 1: return keep_context(op.c & 1 ? cuCtxCreate_v3(out, NULL, 0, 0, device) : cuCtxCreate_v4(out, NULL, 0, device), op.a, &handle);
    case 2: return op.c & 1 ? cuCtxDestroy_v2(handle) : cuCtxDestroy(handle);
    case 3: return cuCtxSetCurrent(handle);
    case 4: return cuCtxPushCurrent_v2(handle);
    case 5: return cuCtxPopCurrent_v2(out);
    case 6:
        result = cuDevicePrimaryCtxRetain(out, device);
        if (keep_context(result, op.a, &handle) == CUDA_SUCCESS && op.c & 1)
            cuCtxSetCurrent(handle);
        return result;
    case 7: return op.c & 1 ? cuDevicePrimaryCtxRelease_v2(device) : cuDevicePrimaryCtxRelease(device);
    case 8: return op.c & 1 ? cuDevicePrimaryCtxReset_v2(device) : cuDevicePrimaryCtxReset(device);
    case 9: return cuCtxAttach(out, 0);
    default: return cuCtxDetach(handle);
    }
}

static CUresult host(struct operation op, unsigned which) {
    void *memory = (void *)handle_of(HOST, op.a);
    size_t free_bytes, total;
    unsigned narrow_free, narrow_total;
    CUresult result;
    switch (which) {
    case 0:
        result = cuMemHostAlloc(op.c == 255 ? NULL : &memory, bytes_of(op.b % 128u, 0), 0);
        if (result == CUDA_SUCCESS)
            made(HOST, op.a, (uintptr_t)memory, 0);
        return result;
    case 1: return cuMemFreeHost(memory);
    case 2: return op.c >= 250 ? cuMemGetInfo_v2(op.c & 1 ? NULL : &free_bytes, NULL) : cuMemGetInfo_v2(&free_bytes, &total);
    case 3: return cuMemGetInfo(&narrow_free, &narrow_total);
    case 4: return op.c & 1 ? cuDeviceTotalMem_v2(op.c == 255 ? NULL : &total, op.b % (DEVICES + 1)) : cuDeviceTotalMem(&narrow_total, op.b);
    default: world_set_limit(op.a % LIMITED, (uint64_t)op.b * 8 * MIB + op.c); return CUDA_SUCCESS;
    }
}

static CUresult step(struct operation op);
static bool in_child;

/* A child that plays on and dies; what it inherited is its parent's. */
static CUresult forked(struct operation op, unsigned which) {
    if (in_child)
        return CUDA_SUCCESS;
    /* beside other threads, a child of _Fork may find malloc locked for ever: no fault of a library */
    pid_t child = which && !concurrent ? _Fork() : fork();
    if (child == 0) {
        alarm(CHILD_PATIENCE_S); /* its default action ends a child that hangs */
        concurrent = false;
        in_child = true;
        for (unsigned i = 0; i < op.a % 8u; i++)
            step((struct operation){.code = (uint8_t)(op.b + 7 * i), .a = (uint8_t)(op.c + i), .b = (uint8_t)(op.a * 5 + i), .c = op.c});
        if (op.c & 1)
            kill(getpid(), SIGKILL);
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
        world_violation("a forked child ended by signal %d", WTERMSIG(status));
    return CUDA_SUCCESS;
}

enum family { ALLOCATE, OTHER, ORDERED, FREE, VIRTUAL, ARRAYS, POOLS, STREAMS, CAPTURES, CONTEXTS, HOSTS, FORKS };

/* What the low 6 bits of a code mean; `alone`: no other thread plays meanwhile. */
static const struct {
    uint8_t family, which;
    bool alone;
} meanings[64] = {
    {ALLOCATE, 0, 0}, {ALLOCATE, 0, 0}, {ALLOCATE, 1, 0}, {OTHER, 0, 0},    {OTHER, 1, 0},    {OTHER, 2, 0},    {ORDERED, 0, 0},  {ORDERED, 1, 0},
    {ORDERED, 2, 0},  {ORDERED, 3, 0},  {FREE, 0, 0},     {FREE, 0, 0},     {FREE, 1, 0},     {FREE, 2, 0},     {FREE, 3, 0},     {FREE, 4, 0},
    {VIRTUAL, 0, 0},  {VIRTUAL, 0, 0},  {VIRTUAL, 1, 0},  {VIRTUAL, 2, 0},  {VIRTUAL, 3, 0},  {VIRTUAL, 3, 0},  {VIRTUAL, 4, 0},  {VIRTUAL, 5, 0},
    {VIRTUAL, 6, 0},  {VIRTUAL, 7, 0},  {ARRAYS, 0, 0},   {ARRAYS, 1, 0},   {ARRAYS, 2, 0},   {ARRAYS, 3, 0},   {ARRAYS, 4, 0},   {ARRAYS, 5, 1},
    {ARRAYS, 6, 1},   {POOLS, 0, 0},    {POOLS, 1, 1},    {POOLS, 2, 0},    {POOLS, 3, 0},    {POOLS, 4, 1},    {POOLS, 5, 0},    {STREAMS, 0, 0},
    {STREAMS, 1, 1},  {STREAMS, 2, 0},  {STREAMS, 3, 0},  {CAPTURES, 0, 1}, {CAPTURES, 1, 1}, {CAPTURES, 2, 0}, {CAPTURES, 3, 1}, {CAPTURES, 4, 1},
    {CAPTURES, 5, 1}, {CAPTURES, 6, 1}, {CONTEXTS, 0, 0}, {CONTEXTS, 1, 0}, {CONTEXTS, 2, 1}, {CONTEXTS, 3, 0}, {CONTEXTS, 4, 0}, {CONTEXTS, 5, 0},
    {CONTEXTS, 6, 0}, {CONTEXTS, 7, 1}, {CONTEXTS, 8, 1}, {CONTEXTS, 10, 1},{HOSTS, 0, 0},    {HOSTS, 2, 0},    {HOSTS, 5, 1},    {FORKS, 0, 0},
};

static CUresult step(struct operation op) {
    unsigned which = meanings[op.code & 63].which;
    switch (meanings[op.code & 63].family) {
    case ALLOCATE: return allocate(op, which);
    case OTHER: return allocate_other(op, which);
    case ORDERED: return allocate_ordered(op, which);
    case FREE: return free_pointer(op, which);
    case VIRTUAL: return virtual(op, which);
    case ARRAYS: return array(op, which);
    case POOLS: return pool(op, which);
    case STREAMS: return stream(op, which);
    case CAPTURES: return capture(op, which);
    case CONTEXTS: return context(op, which == 0 && op.c >= 240 ? 9 : which);
    case HOSTS: return host(op, op.c >= 200 ? which + 1 : which);
    default: return forked(op, op.b >> 7);
    }
}

void play_begin(bool several) {
    memset(slots, 0, sizeof slots);
    for (unsigned i = 0; i < KINDS; i++)
        atomic_store(&logs[i].count, 0);
    atomic_store(&pools_used, false);
    atomic_store(&graph_memory, false);
    concurrent = several;
}

void play(const struct operation *operations, size_t count, unsigned lane) {
    for (size_t i = 0; i < count; i++) {
        struct operation op = operations[i];
        if (op.code >> 6 != lane)
            continue;
        if (concurrent && meanings[op.code & 63].alone)
            pthread_rwlock_wrlock(&rules);
        else if (concurrent)
            pthread_rwlock_rdlock(&rules);
        world_feature(&op, step(op));
        if (concurrent)
            pthread_rwlock_unlock(&rules);
    }
}

bool play_used_pools(void) {
    return atomic_load(&pools_used);
}

static unsigned logged(enum kind kind) {
    unsigned count = atomic_load(&logs[kind].count), room = sizeof logs[kind].handle / sizeof *logs[kind].handle;
    return count < room ? count : room;
}

void play_settle(void) {
    CUmemoryPool handle;
    if (!play_used_pools())
        return;
    for (CUdevice device = 0; device < DEVICES; device++)
        if (cuDeviceGetDefaultMemPool(&handle, device) == CUDA_SUCCESS)
            cuMemPoolTrimTo(handle, SIZE_MAX);
    for (unsigned i = 0; i < logged(POOL); i++)
        cuMemPoolTrimTo((CUmemoryPool)logs[POOL].handle[i], SIZE_MAX);
}

/* Captures of the streams that every thread has of its own in each context, and of those that programs made. */
static void end_captures(void) {
    CUgraph graph;
    for (unsigned i = 0; i < logged(STREAM); i++)
        if (cuStreamEndCapture((CUstream)logs[STREAM].handle[i], &graph) == CUDA_SUCCESS)
            made(GRAPH, 0, (uintptr_t)graph, 0);
    for (unsigned i = 0; i < logged(CONTEXT); i++) {
        CUcontext popped;
        if (cuCtxPushCurrent_v2((CUcontext)logs[CONTEXT].handle[i]) != CUDA_SUCCESS)
            continue;
        if (cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph) == CUDA_SUCCESS)
            made(GRAPH, 0, (uintptr_t)graph, 0);
        cuCtxPopCurrent_v2(&popped);
    }
}

void play_leave(void) {
    pthread_rwlock_wrlock(&rules);
    end_captures();
    pthread_rwlock_unlock(&rules);
}

void play_clean(void) {
    CUcontext context;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    cuThreadExchangeStreamCaptureMode(&mode);
    end_captures();
    for (unsigned i = 0; i < logged(EXEC); i++)
        cuGraphExecDestroy((CUgraphExec)logs[EXEC].handle[i]);
    for (unsigned i = 0; i < logged(GRAPH); i++)
        cuGraphDestroy((CUgraph)logs[GRAPH].handle[i]);
    for (unsigned i = 0; i < logged(POINTER); i++)
        if (i % 2 || cuMemFreeAsync(logs[POINTER].handle[i], NULL) != CUDA_SUCCESS)
            cuMemFree_v2(logs[POINTER].handle[i]);
    for (unsigned i = 0; i < logged(RANGE); i++) {
        for (uint64_t at = 0; at < logs[RANGE].size[i]; at += GRANULE) /* a mapping has any number of granules */
            for (uint64_t size = GRANULE; size <= 16 * GRANULE && cuMemUnmap(logs[RANGE].handle[i] + at, size) != CUDA_SUCCESS; size += GRANULE) {
            }
        cuMemAddressFree(logs[RANGE].handle[i], logs[RANGE].size[i]);
    }
    for (unsigned i = 0; i < logged(PHYSICAL); i++)
        while (cuMemRelease(logs[PHYSICAL].handle[i]) == CUDA_SUCCESS) {
        }
    for (unsigned i = 0; i < logged(ARRAY); i++)
        cuArrayDestroy((CUarray)logs[ARRAY].handle[i]);
    for (unsigned i = 0; i < logged(MIPMAP); i++)
        cuMipmappedArrayDestroy((CUmipmappedArray)logs[MIPMAP].handle[i]);
    for (unsigned i = 0; i < logged(POOL); i++)
        cuMemPoolDestroy((CUmemoryPool)logs[POOL].handle[i]);
    for (CUdevice device = 0; play_used_pools() && device < DEVICES; device++) {
        CUmemoryPool pool;
        cuuint64_t none = 0;
        if (cuDeviceGetDefaultMemPool(&pool, device) == CUDA_SUCCESS) {
            cuDeviceSetMemPool(device, pool);
            cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
            cuMemPoolTrimTo(pool, 0);
        }
    }
    for (unsigned i = 0; i < logged(HOST); i++)
        cuMemFreeHost((void *)logs[HOST].handle[i]);
    for (unsigned i = 0; i < logged(CONTEXT); i++)
        cuCtxDestroy_v2((CUcontext)logs[CONTEXT].handle[i]);
    for (CUdevice device = 0; device < DEVICES; device++)
        cuDevicePrimaryCtxReset_v2(device);
    for (int i = 0; i < 100 && cuCtxPopCurrent_v2(&context) == CUDA_SUCCESS; i++) {
    }
}
