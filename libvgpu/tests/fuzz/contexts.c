/* Operations of the fuzz target on contexts. */
#define _GNU_SOURCE
#include "handles.h"

static CUresult keep_context(CUresult result, unsigned slot, const CUcontext *context) {
    if (result == CUDA_SUCCESS)
        made(CONTEXT, slot % 4u, (uintptr_t)*context, 0);
    return result;
}

/* What lived in a context has gone with it. Beside other threads nobody may free it again: it could be a block that one
 * of them was just given. */
static CUresult gone(CUresult result) {
    for (unsigned slot = 0; concurrent && slot < SLOTS; slot++)
        atomic_store(&slots[POINTER][slot], 0);
    return result;
}

CUresult context(struct operation op, unsigned which) {
    CUdevice device = op.b >= 250 ? (CUdevice)op.b : op.b % (DEVICES + 1);
    CUcontext handle = (CUcontext)handle_of(CONTEXT, op.a < 250 ? op.a % 4u : op.a);
    CUcontext *out = op.c == 255 ? NULL : &handle;
    CUresult result;
    switch (which) {
    case 0: return keep_context(op.c & 1 ? cuCtxCreate_v2(out, 0, device) : cuCtxCreate(out, 0, device), op.a, &handle);
    case 1:
        return keep_context(op.c & 1 ? cuCtxCreate_v3(out, NULL, 0, 0, device) : cuCtxCreate_v4(out, NULL, 0, device),
                            op.a, &handle);
    case 2: return gone(op.c & 1 ? cuCtxDestroy_v2(handle) : cuCtxDestroy(handle));
    case 3: return cuCtxSetCurrent(handle);
    case 4: return cuCtxPushCurrent_v2(handle);
    case 5: return cuCtxPopCurrent_v2(out);
    case 6:
        result = cuDevicePrimaryCtxRetain(out, device);
        if (keep_context(result, op.a, &handle) == CUDA_SUCCESS && op.c & 1)
            cuCtxSetCurrent(handle);
        return result;
    case 7: return gone(op.c & 1 ? cuDevicePrimaryCtxRelease_v2(device) : cuDevicePrimaryCtxRelease(device));
    case 8: return gone(op.c & 1 ? cuDevicePrimaryCtxReset_v2(device) : cuDevicePrimaryCtxReset(device));
    case 9: return cuCtxAttach(out, 0);
    default: return gone(cuCtxDetach(handle));
    }
}
