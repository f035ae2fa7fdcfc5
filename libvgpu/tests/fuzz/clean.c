/* The end of a program. */
#define _GNU_SOURCE
#include "handles.h"

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
    for (unsigned i = 0; i < logged(EXTERNAL); i++)
        cuDestroyExternalMemory((CUexternalMemory)logs[EXTERNAL].handle[i]);
    for (unsigned i = 0; i < logged(IMPORTED); i++)
        cuIpcCloseMemHandle(logs[IMPORTED].handle[i]);
    for (unsigned i = 0; i < logged(RANGE); i++) {
        for (uint64_t at = 0; at < logs[RANGE].size[i]; at += GRANULE) /* a mapping has any number of granules */
            for (uint64_t size = GRANULE;
                 size <= 16 * GRANULE && cuMemUnmap(logs[RANGE].handle[i] + at, size) != CUDA_SUCCESS;
                 size += GRANULE) {
            }
        cuMemAddressFree(logs[RANGE].handle[i], logs[RANGE].size[i]);
    }
    close_exported();
    for (unsigned i = 0; i < logged(PHYSICAL); i++)
        while (cuMemRelease(logs[PHYSICAL].handle[i]) == CUDA_SUCCESS) {
        }
    for (unsigned i = 0; i < logged(MULTICAST); i++)
        while (cuMemRelease(logs[MULTICAST].handle[i]) == CUDA_SUCCESS) {
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
    play_trim_graphs(); /* the contexts have taken theirs with them */
    for (int i = 0; i < 100 && cuCtxPopCurrent_v2(&context) == CUDA_SUCCESS; i++) {
    }
}
