/* Begin and end of stream captures, counted so that launches need not ask the driver as long as there is none. */
#define _GNU_SOURCE
#include "capture.h"

atomic_int vgpu_open_captures;

/* Counted before the driver begins, so that no other thread's event gets in between. */
#define BEGIN(...)                                                                                                                                 \
    atomic_fetch_add(&vgpu_open_captures, 1);                                                                                                      \
    CUresult result = real(__VA_ARGS__);                                                                                                           \
    if (result != CUDA_SUCCESS)                                                                                                                    \
        atomic_fetch_sub(&vgpu_open_captures, 1);                                                                                                  \
    return result

CUresult cuStreamBeginCapture(CUstream stream) {
    CUDA_REAL(cuStreamBeginCapture);
    BEGIN(stream);
}

CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
    CUDA_REAL(cuStreamBeginCapture_ptsz);
    BEGIN(stream);
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCapture_v2);
    BEGIN(stream, mode);
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCapture_v2_ptsz);
    BEGIN(stream, mode);
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
                                     CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCaptureToGraph);
    BEGIN(stream, graph, dependencies, edges, count, mode);
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
                                          size_t count, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCaptureToGraph_ptsz);
    BEGIN(stream, graph, dependencies, edges, count, mode);
}

/* An invalidated capture ends with an error, and is ended all the same; what was no capture, or not this thread's, stays counted. */
static CUresult ended(CUresult result) {
    int open = atomic_load(&vgpu_open_captures);
    bool over = result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED || result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    while (over && open > 0 && !atomic_compare_exchange_weak(&vgpu_open_captures, &open, open - 1)) {
    }
    return result;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    CUDA_REAL(cuStreamEndCapture);
    return ended(real(stream, graph));
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    CUDA_REAL(cuStreamEndCapture_ptsz);
    return ended(real(stream, graph));
}
