/* Green contexts: parts of a card that a primary context gives to streams. Their memory belongs to the primary
 * context. */
#define _GNU_SOURCE
#include "gate/gate.h"
#include "gate/streams.h"
#include "ledger/cards.h"
#include "ledger/charge.h"
#include "pacer/pacer.h"
#include "tier/tier.h"

static CUcontext of_green(CUgreenCtx green) {
    CUcontext context = NULL;
    return DRIVER(cuCtxFromGreenCtx) && DRIVER(cuCtxFromGreenCtx)(&context, green) == CUDA_SUCCESS ? context : NULL;
}

CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx context, unsigned int flags, int priority) {
    CUDA_REAL(cuGreenCtxStreamCreate);
    CUstream made = NULL; /* the driver's answer is recorded before the program can see it */
    const CUresult result = real(stream ? &made : NULL, context, flags, priority);
    if (result != CUDA_SUCCESS || !stream)
        return result;
    if (vgpu_gate_is_armed())
        vgpu_stream_made(made, of_green(context));
    *stream = made;
    return result;
}

/* The primary context, which its green context keeps alive; NULL: the driver does not say. */
static CUcontext primary_beside(CUcontext context, CUdevice *device) {
    CUcontext primary = NULL;
    bool pushed;
    if (!DRIVER(cuCtxGetDevice) || !DRIVER(cuDevicePrimaryCtxRetain) || !DRIVER(cuDevicePrimaryCtxRelease_v2))
        return NULL;
    const bool known = vgpu_tier_enter_context(context, &pushed) && DRIVER(cuCtxGetDevice)(device) == CUDA_SUCCESS;
    vgpu_tier_leave_context(pushed);
    if (!known || !vgpu_primary_is_active(*device) ||
        DRIVER(cuDevicePrimaryCtxRetain)(&primary, *device) != CUDA_SUCCESS)
        return NULL;
    DRIVER(cuDevicePrimaryCtxRelease_v2)(*device);
    return primary;
}

/* Blocks of the tier made in the green context now belong to the primary context, or are freed if that is gone. */
static void went_green(CUcontext context, bool gone, CUcontext primary, CUdevice device, bool finished,
                       uint64_t moment) {
    if (gone && primary && !vgpu_primary_is_active(device))
        vgpu_tier_context_went(context, true, moment);
    else
        vgpu_tier_green_went(context, gone, primary ? primary : context, finished, moment);
}

typedef CUresult (*destroy_function)(CUgreenCtx);

static CUresult destroy_gated(destroy_function real, CUgreenCtx green, CUcontext context) {
    CUdevice device = 0;
    const CUcontext primary = context ? primary_beside(context, &device) : NULL;
    const bool finished = !context || vgpu_tier_green_going(context);
    const uint64_t moment = vgpu_tier_moment();
    vgpu_gate_enter(); /* so that no thread asks about its streams meanwhile */
    const bool idle = context && vgpu_streams_context_idle(context);
    if (context)
        vgpu_streams_context_going(context);
    const CUresult result = real(green);
    if (context)
        vgpu_streams_context_went(context, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS && !idle)
        vgpu_streams_lost("a green context was destroyed that had work to do");
    vgpu_gate_leave();
    if (context)
        went_green(context, result == CUDA_SUCCESS, primary, device, finished, moment);
    return result;
}

/* The streams of a destroyed green context stay, but can no longer be asked (CUDA_ERROR_STREAM_DETACHED). Its memory
 * belongs to the primary context. Another context may get its handle, and events of this context are invalid there. */
CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    CUDA_REAL(cuGreenCtxDestroy);
    const CUcontext context = vgpu_enforcement() == VGPU_UNLIMITED ? NULL : of_green(green);
    vgpu_pacer_waited();
    vgpu_samples_going(context);
    const CUresult result = vgpu_gate_is_armed() ? destroy_gated(real, green, context) : real(green);
    vgpu_samples_detached(context, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        vgpu_places_forget();
    return result;
}

CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event) {
    CUDA_REAL(cuGreenCtxWaitEvent);
    if (!vgpu_gate_is_armed())
        return real(green, event);
    vgpu_gate_enter();
    const CUresult result = real(green, event);
    if (result == CUDA_SUCCESS)
        vgpu_default_stream_used(of_green(green));
    vgpu_gate_leave();
    return result;
}
