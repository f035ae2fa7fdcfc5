/* Begin and end of stream captures. The hooks count captures, so that launches need not ask the driver while there is
 * none. */
#define _GNU_SOURCE
#include "reserves/capture.h"
#include "hooks/gated.h"
#include "pacer/samples.h"

/* Counts before the driver begins, so that no other thread records an event in between. Not while a thread asks whether
 * streams have finished. */
#define BEGIN(stream, ...)                                                                                             \
    const bool gated = vgpu_gate_is_armed();                                                                           \
    if (gated)                                                                                                         \
        vgpu_gate_enter();                                                                                             \
    struct vgpu_capture *capture = vgpu_capture_beginning(stream);                                                     \
    if (gated)                                                                                                         \
        vgpu_marks_settle();                                                                                           \
    CUresult result = capture ? real(__VA_ARGS__) : CUDA_ERROR_OUT_OF_MEMORY;                                          \
    vgpu_captures_settle(capture, result != CUDA_SUCCESS);                                                             \
    if (gated)                                                                                                         \
        vgpu_gate_leave();                                                                                             \
    return result

CUresult cuStreamBeginCapture(CUstream stream) {
    CUDA_REAL(cuStreamBeginCapture);
    BEGIN(stream, stream);
}

CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
    CUDA_REAL(cuStreamBeginCapture_ptsz);
    BEGIN(per_thread(stream), stream);
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCapture_v2);
    BEGIN(stream, stream, mode);
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCapture_v2_ptsz);
    BEGIN(per_thread(stream), stream, mode);
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCaptureToGraph);
    BEGIN(stream, stream, graph, dependencies, edges, count, mode);
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                          const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    CUDA_REAL(cuStreamBeginCaptureToGraph_ptsz);
    BEGIN(per_thread(stream), stream, graph, dependencies, edges, count, mode);
}

CUresult cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *parameters) {
    CUDA_REAL(cuStreamBeginCaptureToCig);
    BEGIN(stream, stream, parameters);
}

CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, CUstreamCigCaptureParams *parameters) {
    CUDA_REAL(cuStreamBeginCaptureToCig_ptsz);
    BEGIN(per_thread(stream), stream, parameters);
}

CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                       CUgraphRecaptureCallback callback, void *data) {
    CUDA_REAL(cuStreamBeginRecaptureToGraph);
    BEGIN(stream, stream, mode, graph, callback, data);
}

CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                            CUgraphRecaptureCallback callback, void *data) {
    CUDA_REAL(cuStreamBeginRecaptureToGraph_ptsz);
    BEGIN(per_thread(stream), stream, mode, graph, callback, data);
}

/* A capture that was invalidated or not joined ends with an error. A stream without a capture, or with another thread's
 * capture, stays as it is. */
static CUresult ended(CUstream stream, CUresult result) {
    vgpu_captures_ended();
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (result == CUDA_SUCCESS ||
        (vgpu_any_capture() && DRIVER(cuStreamIsCapturing) &&
         DRIVER(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE))
        vgpu_captures_end(stream, NULL);
    return result;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    CUDA_REAL(cuStreamEndCapture);
    vgpu_captures_ending();
    return ended(stream, real(stream, graph));
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    CUDA_REAL(cuStreamEndCapture_ptsz);
    vgpu_captures_ending();
    return ended(per_thread(stream), real(stream, graph));
}

CUresult cuStreamEndCaptureToCig(CUstream stream) {
    CUDA_REAL(cuStreamEndCaptureToCig);
    vgpu_captures_ending();
    return ended(stream, real(stream));
}

CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream) {
    CUDA_REAL(cuStreamEndCaptureToCig_ptsz);
    vgpu_captures_ending();
    return ended(per_thread(stream), real(stream));
}

/* Destroying a stream ends its capture. The capture leaves the list before the driver may give the same handle to
 * another thread. */
static CUresult destroy(CUresult (*real)(CUstream), CUstream stream) {
    struct vgpu_departure departure = {.stream = stream};
    if (vgpu_gate_is_armed())
        vgpu_stream_going(stream);
    vgpu_samples_stream_going(stream);
    struct vgpu_capture *taken = vgpu_captures_take(stream);
    vgpu_capture_departs(&departure);
    CUresult result = real(stream);
    vgpu_capture_departed(&departure);
    vgpu_captures_settle(taken, result == CUDA_SUCCESS);
    return result;
}

CUresult cuStreamDestroy(CUstream stream) {
    CUDA_REAL(cuStreamDestroy);
    return destroy(real, stream);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    CUDA_REAL(cuStreamDestroy_v2);
    return destroy(real, stream);
}
