/* Graphs: a graph launch is work, and may make the driver reserve memory. */
#define _GNU_SOURCE
#include "reserves/graphs.h"

#include <errno.h>

#include "hooks/gated.h"
#include "ledger/charge.h"
#include "pacer/graph_cards.h"
#include "pacer/pacer.h"
#include "pacer/prepaid.h"
#include "reserves/capture.h"
#include "tier/graph_touches.h"

typedef CUresult (*run_function)(CUgraphExec, CUstream);

static CUresult hand_in(run_function real, CUgraphExec exec, CUstream given, CUstream stream) {
    if (!vgpu_gate_is_armed())
        return real(exec, given);
    vgpu_handing_in(stream);
    CUresult result = real(exec, given);
    vgpu_handed_in();
    return result;
}

/* `stream`: the stream that the driver will use; `given`: the stream that the program passed. */
static CUresult with_memory(run_function real, CUgraphExec exec, CUstream given, CUstream stream) {
    struct vgpu_graph *graph = vgpu_graph_find(exec);
    if (__builtin_expect(!graph, 1) || vgpu_enforcement() == VGPU_UNLIMITED)
        return hand_in(real, exec, given, stream);
    struct vgpu_graph_launch launch;
    int kept = errno;
    bool charged = vgpu_graph_charge(graph, stream, &launch);
    errno = kept;
    if (!charged)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = hand_in(real, exec, given, stream);
    kept = errno;
    vgpu_graph_settle(&launch);
    errno = kept;
    return result;
}

/* A captured launch takes no memory now. An upload cannot be captured: a driver refuses it or does it at once. */
static CUresult launch_with_memory(run_function real, CUgraphExec exec, CUstream given, CUstream stream) {
    if (!vgpu_recording(stream))
        return with_memory(real, exec, given, stream);
    CUresult result = real(exec, given);
    vgpu_recorded();
    return result;
}

static CUresult paced(run_function real, CUgraphExec exec, CUstream given, CUstream stream) {
    const uint64_t key = vgpu_cost_key(exec, 1, 1);
    struct vgpu_launch launch = {.function = NULL};
    if (vgpu_pacer_prepaid(key, stream))
        return launch_with_memory(real, exec, given, stream);
    if (vgpu_gate_is_armed()) {
        vgpu_safe_point();
        vgpu_touched_graph(exec);
    }
    if (__builtin_expect(!vgpu_pacer_before_on(&launch, key, stream, vgpu_graph_cards_of(exec)), 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return vgpu_pacer_after(&launch, launch_with_memory(real, exec, given, stream));
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    CUDA_REAL(cuGraphLaunch);
    return paced(real, graph, stream, stream);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) {
    CUDA_REAL(cuGraphLaunch_ptsz);
    return paced(real, graph, stream, per_thread(stream));
}

CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) {
    CUDA_REAL(cuGraphUpload);
    return with_memory(real, graph, stream, stream);
}

CUresult cuGraphUpload_ptsz(CUgraphExec graph, CUstream stream) {
    CUDA_REAL(cuGraphUpload_ptsz);
    return with_memory(real, graph, stream, per_thread(stream));
}

static CUresult read_memory(CUgraph graph, struct vgpu_graph **out) {
    int kept = errno;
    *out = NULL;
    CUresult result = vgpu_enforcement() == VGPU_UNLIMITED ? CUDA_SUCCESS : vgpu_graph_read(graph, out);
    errno = kept;
    return result;
}

/* Reads a graph's allocations after the instantiation. Memory nodes never leave their graph (cuda.h,
 * cuGraphDestroyNode), so nodes that other threads add meanwhile are found. A child graph that another thread adds and
 * destroys in between is not found: docs/limits.md. The result is stored under the handle before the program can see
 * the handle. `before`: read and charged earlier, for an upload in the same call. */
static CUresult instantiated(CUresult result, CUgraph graph, CUgraphExec made, struct vgpu_graph *before,
                             CUgraphExec *exec) {
    struct vgpu_graph *found = NULL;
    CUresult read = result == CUDA_SUCCESS ? read_memory(graph, &found) : CUDA_SUCCESS;
    if (read != CUDA_SUCCESS && DRIVER(cuGraphExecDestroy)) /* a graph whose memory cannot be paid for is destroyed */
        DRIVER(cuGraphExecDestroy)(made);
    if (result != CUDA_SUCCESS || read != CUDA_SUCCESS) {
        vgpu_graph_keep(before, NULL);
        return result != CUDA_SUCCESS ? result : read;
    }
    vgpu_graph_keep(vgpu_graph_later(before, found), made);
    if (vgpu_gate_is_armed())
        vgpu_graph_touches_read(graph, made);
    vgpu_graph_cards_read(graph, made);
    *exec = made;
    return CUDA_SUCCESS;
}

/* Inside the gate, because the driver looks up the addresses in nodes. */
#define INSTANTIATE(...)                                                                                               \
    CUgraphExec made = NULL;                                                                                           \
    const bool gated = vgpu_gate_is_armed();                                                                           \
    if (gated)                                                                                                         \
        vgpu_gate_enter();                                                                                             \
    CUresult result = real(exec ? &made : NULL, __VA_ARGS__);                                                          \
    if (gated)                                                                                                         \
        vgpu_gate_leave();                                                                                             \
    return instantiated(result, graph, made, NULL, exec)

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size) {
    CUDA_REAL(cuGraphInstantiate);
    INSTANTIATE(graph, error_node, log, size);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size) {
    CUDA_REAL(cuGraphInstantiate_v2);
    INSTANTIATE(graph, error_node, log, size);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    CUDA_REAL(cuGraphInstantiateWithFlags);
    INSTANTIATE(graph, flags);
}

typedef CUresult (*instantiate_function)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);

static CUresult instantiate(instantiate_function real, CUgraphExec *made, CUgraph graph,
                            CUDA_GRAPH_INSTANTIATE_PARAMS *parameters, CUstream stream) {
    if (!vgpu_gate_is_armed())
        return real(made, graph, parameters);
    vgpu_gate_enter();
    if (parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        vgpu_stream_used(stream);
    CUresult result = real(made, graph, parameters);
    vgpu_gate_leave();
    return result;
}

/* With an upload, the instantiation reserves memory as a launch does. */
static CUresult with_parameters(instantiate_function real, CUgraphExec *exec, CUgraph graph,
                                CUDA_GRAPH_INSTANTIATE_PARAMS *parameters, bool own_default) {
    if (!exec || !parameters)
        return real(exec, graph, parameters);
    CUDA_GRAPH_INSTANTIATE_PARAMS copy = *parameters;
    struct vgpu_graph *found = NULL;
    struct vgpu_graph_launch upload = {.count = 0};
    CUgraphExec made = NULL;
    CUresult result = copy.flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD ? read_memory(graph, &found) : CUDA_SUCCESS;
    const CUstream stream = own_default ? per_thread(copy.hUploadStream) : copy.hUploadStream;
    if (found && !vgpu_graph_charge(found, stream, &upload))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        result = instantiate(real, &made, graph, &copy, stream);
        vgpu_graph_settle(&upload);
        result = instantiated(result, graph, made, found, exec);
    } else {
        vgpu_graph_keep(found, NULL);
        copy.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    }
    /* the driver itself had succeeded */
    if (result != CUDA_SUCCESS && copy.result_out == CUDA_GRAPH_INSTANTIATE_SUCCESS)
        copy.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    *parameters = copy;
    return result;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    CUDA_REAL(cuGraphInstantiateWithParams);
    return with_parameters(real, exec, graph, parameters, false);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    CUDA_REAL(cuGraphInstantiateWithParams_ptsz);
    return with_parameters(real, exec, graph, parameters, true);
}

/* The entry leaves the table before the driver may give the same handle to another thread. */
CUresult cuGraphExecDestroy(CUgraphExec exec) {
    CUDA_REAL(cuGraphExecDestroy);
    struct vgpu_graph *graph = vgpu_graph_take(exec);
    if (vgpu_gate_is_armed())
        vgpu_graph_touches_gone(exec);
    vgpu_graph_cards_gone(exec);
    CUresult result = real(exec);
    vgpu_graph_keep(graph, result == CUDA_SUCCESS ? NULL : exec);
    if (result == CUDA_SUCCESS)
        vgpu_pacer_stale(vgpu_cost_key(exec, 1, 1)); /* the next graph may get this handle */
    return result;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    CUDA_REAL(cuDeviceGraphMemTrim);
    CUresult result = real(device);
    if (result == CUDA_SUCCESS && vgpu_enforcement() != VGPU_UNLIMITED)
        vgpu_pools_settle(vgpu_card_of_device(device));
    return result;
}
