/* Streams: creating and destroying them, their operations besides kernels and copies, and waits. */
#define _GNU_SOURCE
#include "hooks/gated.h"
#include "pacer/pacer.h"

/* The driver's answer is recorded before the program can see it. */
#define MAKE(in_context, ...)                                                                                          \
    CUstream made = NULL;                                                                                              \
    CUresult result = real(stream ? &made : NULL, __VA_ARGS__);                                                        \
    if (result != CUDA_SUCCESS || !stream)                                                                             \
        return result;                                                                                                 \
    if (vgpu_gate_is_armed())                                                                                          \
        vgpu_stream_made(made, in_context);                                                                            \
    *stream = made;                                                                                                    \
    return result

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    CUDA_REAL(cuStreamCreate);
    MAKE(NULL, flags);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    CUDA_REAL(cuStreamCreateWithPriority);
    MAKE(NULL, flags, priority);
}

/* After a wait the card probably has no work. */
static CUresult waited(const struct vgpu_wait *wait, CUresult result, bool own) {
    vgpu_pacer_waited_for(wait);
    if (!vgpu_gate_is_armed())
        return result;
    if (result == CUDA_SUCCESS && own)
        vgpu_own_stream_finished();
    if (result == CUDA_SUCCESS)
        vgpu_safe_point_idle();
    return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
    CUDA_REAL(cuStreamSynchronize);
    struct vgpu_wait paced;
    vgpu_pacer_waits(&paced);
    return waited(&paced, real(stream), stream == CU_STREAM_PER_THREAD);
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    CUDA_REAL(cuStreamSynchronize_ptsz);
    struct vgpu_wait paced;
    vgpu_pacer_waits(&paced);
    return waited(&paced, real(stream), per_thread(stream) == CU_STREAM_PER_THREAD);
}

CUresult cuEventSynchronize(CUevent event) {
    CUDA_REAL(cuEventSynchronize);
    struct vgpu_wait paced;
    vgpu_pacer_waits(&paced);
    return waited(&paced, real(event), false);
}

CUresult cuCtxSynchronize(void) {
    CUDA_REAL(cuCtxSynchronize);
    struct vgpu_wait paced;
    vgpu_pacer_waits(&paced);
    if (!vgpu_gate_is_armed())
        return waited(&paced, real(), false);
    struct vgpu_stream_wait wait;
    vgpu_context_waiting(&wait, NULL);
    CUresult result = real();
    if (result == CUDA_SUCCESS)
        vgpu_context_finished(&wait);
    return waited(&paced, result, false);
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
    CUDA_REAL(cuCtxSynchronize_v2);
    struct vgpu_wait paced;
    vgpu_pacer_waits(&paced);
    if (!vgpu_gate_is_armed())
        return waited(&paced, real(context), false);
    struct vgpu_stream_wait wait;
    vgpu_context_waiting(&wait, context);
    CUresult result = real(context);
    if (result == CUDA_SUCCESS)
        vgpu_context_finished(&wait);
    return waited(&paced, result, false);
}

GATED(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data), (stream, function, data), stream)
GATED(cuLaunchHostFunc_ptsz, (CUstream stream, CUhostFn function, void *data), (stream, function, data),
      per_thread(stream))
GATED(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn function, void *data, unsigned int mode),
      (stream, function, data, mode), stream)
GATED(cuLaunchHostFunc_v2_ptsz, (CUstream stream, CUhostFn function, void *data, unsigned int mode),
      (stream, function, data, mode), per_thread(stream))
GATED(cuSignalExternalSemaphoresAsync,
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *parameters,
       unsigned int count, CUstream stream),
      (semaphores, parameters, count, stream), stream)
GATED(cuSignalExternalSemaphoresAsync_ptsz,
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *parameters,
       unsigned int count, CUstream stream),
      (semaphores, parameters, count, stream), per_thread(stream))
GATED(cuStreamAddCallback, (CUstream stream, CUstreamCallback function, void *data, unsigned int flags),
      (stream, function, data, flags), stream)
GATED(cuStreamAddCallback_ptsz, (CUstream stream, CUstreamCallback function, void *data, unsigned int flags),
      (stream, function, data, flags), per_thread(stream))
GATED(cuStreamAttachMemAsync, (CUstream stream, CUdeviceptr at, size_t length, unsigned int flags),
      (stream, at, length, flags), stream)
GATED(cuStreamAttachMemAsync_ptsz, (CUstream stream, CUdeviceptr at, size_t length, unsigned int flags),
      (stream, at, length, flags), per_thread(stream))
GATED(cuStreamBatchMemOp, (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags),
      (stream, count, list, flags), stream)
GATED(cuStreamBatchMemOp_ptsz,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags),
      (stream, count, list, flags), per_thread(stream))
GATED(cuStreamBatchMemOp_v2, (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags),
      (stream, count, list, flags), stream)
GATED(cuStreamBatchMemOp_v2_ptsz,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags),
      (stream, count, list, flags), per_thread(stream))
/* The event may come from another process that waits for this process. So a move, which waits for its copies, must not
 * be queued behind it. */
GATED(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), (stream, event, flags), stream)
GATED(cuStreamWaitEvent_ptsz, (CUstream stream, CUevent event, unsigned int flags), (stream, event, flags),
      per_thread(stream))

/* Affects all streams of a context; moves copy in its default stream. */
CUresult cuCtxWaitEvent(CUcontext context, CUevent event) {
    CUDA_REAL(cuCtxWaitEvent);
    if (!vgpu_gate_is_armed())
        return real(context, event);
    vgpu_gate_enter();
    const CUresult result = real(context, event);
    if (result == CUDA_SUCCESS)
        vgpu_default_stream_used(context);
    vgpu_gate_leave();
    return result;
}

GATED(cuStreamWaitValue32, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWaitValue32_ptsz, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWaitValue32_v2_ptsz, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWaitValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWaitValue64_ptsz, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWaitValue64_v2_ptsz, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWriteValue32, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWriteValue32_ptsz, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWriteValue32_v2_ptsz, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWriteValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWriteValue64_ptsz, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuStreamWriteValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), stream)
GATED(cuStreamWriteValue64_v2_ptsz, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags),
      (stream, at, value, flags), per_thread(stream))
GATED(cuWaitExternalSemaphoresAsync,
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *parameters, unsigned int count,
       CUstream stream),
      (semaphores, parameters, count, stream), stream)
GATED(cuWaitExternalSemaphoresAsync_ptsz,
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *parameters, unsigned int count,
       CUstream stream),
      (semaphores, parameters, count, stream), per_thread(stream))
