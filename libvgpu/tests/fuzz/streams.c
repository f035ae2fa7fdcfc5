/* Streams, what is allocated in their order, captures and graphs. */
#define _GNU_SOURCE
#include "handles.h"

CUresult allocate_ordered(struct operation op, unsigned which) {
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
    return keep_pointer(result, op.a, &pointer);
}

CUresult pool(struct operation op, unsigned which) {
    CUmemPoolProps properties = {
        .allocType = op.c == 255 ? CU_MEM_ALLOCATION_TYPE_INVALID : CU_MEM_ALLOCATION_TYPE_PINNED,
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

/* Beside other threads nobody else may free what is written to meanwhile. */
static CUresult set_bytes(struct operation op) {
    bool taken = concurrent && op.a < 250;
    CUdeviceptr pointer = taken ? atomic_exchange(&slots[POINTER][op.a % SLOTS], 0) : handle_of(POINTER, op.a);
    CUresult result = cuMemsetD8Async(pointer, op.b, 64, stream_of(op.c));
    uint64_t empty = 0;
    if (taken && !atomic_compare_exchange_strong(&slots[POINTER][op.a % SLOTS], &empty, pointer) && pointer)
        cuMemFree_v2(pointer); /* the slot has got another one */
    return result;
}

CUresult stream(struct operation op, unsigned which) {
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
    case 2:
        return op.b & 1                                ? cuStreamSynchronize(stream_of(op.c))
               : cuCtxGetCurrent(&context) || !context ? CUDA_SUCCESS
                                                       : cuCtxSynchronize();
    default: return set_bytes(op);
    }
}

/* Kernels of a few microseconds, under a core limit where world_begin has chosen one. The driver's memory for their
 * module is nobody's request: it goes before anything is compared. */
CUresult launch(struct operation op) {
    static const char image[] =
        ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry fuzz()\n{\n    ret;\n}\n";
    CUmodule module = NULL;
    CUfunction function = NULL;
    CUstream stream = stream_of(op.c);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuStreamIsCapturing(stream, &status);
    if (op.b < 64 || status != CU_STREAM_CAPTURE_STATUS_NONE)
        return set_bytes(op);
    CUresult result = cuModuleLoadData(&module, image);
    if (result == CUDA_SUCCESS)
        result = cuModuleGetFunction(&function, module, "fuzz");
    for (unsigned i = 0; result == CUDA_SUCCESS && i <= op.b % 8u; i++)
        result = op.c & 1 ? cuLaunchKernel(function, 1 + op.b % 4u, 1, 1, 32, 1, 1, 0, stream, NULL, NULL)
                          : cuLaunchKernel_ptsz(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
    if (module)
        cuModuleUnload(module);
    return result;
}

CUresult capture(struct operation op, unsigned which) {
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
    case 4: return op.b & 1 ? cuGraphLaunch(exec, stream_of(op.c)) : cuGraphLaunch_ptsz(exec, stream_of(op.c));
    case 5: return cuGraphDestroy(graph);
    default: return cuGraphExecDestroy(exec);
    }
}
