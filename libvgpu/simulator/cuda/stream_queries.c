/* Queries about streams. */
#include "cuda/driver.h"

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !priority)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !flags)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !id)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *id = stream->id;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    INJECT();
    CUstream stream = handle;
    /* cuda.h: a current context is only needed for the default streams */
    CUresult result = object_is(handle, OBJECT_STREAM) ? CUDA_SUCCESS : stream_resolve(handle, &stream);
    if (result || !context)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *context = stream->green ? stream->green->handle : stream->context;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, CUgreenCtx *green) {
    INJECT();
    CUresult result = cuStreamGetCtx(handle, context);
    if (!result && green) /* cuda.h: if `green` is asked for, the context is the primary one */
        *green = (*context)->green;
    if (!result && (*context)->green)
        *context = green ? (*context)->base : *context;
    return result;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !device)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t length, unsigned int flags) {
    INJECT();
    CUstream stream;
    (void)length, (void)flags;
    CUresult result = stream_resolve(handle, &stream);
    return result ? result : address ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
