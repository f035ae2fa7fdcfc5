/* Graphs that allocate: built node by node or by a capture, instantiated, uploaded, launched, updated, and what the
 * driver keeps for them. */
#define _GNU_SOURCE
#include "handles.h"

/* the most that graphs had reserved, whatever became of the driver's own mark */
static _Atomic uint64_t highest[DEVICES];

static uint64_t attribute_of(CUdevice device, CUgraphMem_attribute attribute) {
    cuuint64_t value = 0;
    return cuDeviceGetGraphMemAttribute(device, attribute, &value) == CUDA_SUCCESS ? value : 0;
}

static void note_highest(CUdevice device) {
    uint64_t high = attribute_of(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), known = atomic_load(&highest[device]);
    while (high > known && !atomic_compare_exchange_weak(&highest[device], &known, high)) {
    }
}

void graphs_begin(void) {
    for (CUdevice device = 0; device < DEVICES; device++) {
        cuuint64_t none = 0;
        cuDeviceSetGraphMemAttribute(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &none);
        atomic_store(&highest[device], 0);
    }
}

uint64_t play_graphs_beyond(unsigned card) {
    note_highest((CUdevice)card);
    uint64_t high = atomic_load(&highest[card]),
             now = attribute_of((CUdevice)card, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    return high > now ? high - now : 0;
}

void play_trim_graphs(void) {
    for (CUdevice device = 0; device < DEVICES; device++)
        cuDeviceGraphMemTrim(device);
}

static CUgraph graph_of(uint8_t slot) {
    return (CUgraph)handle_of(GRAPH, slot < 250 ? slot % 4u : slot);
}

static CUresult keep_exec(CUresult result, unsigned slot, const CUgraphExec *exec) {
    if (result == CUDA_SUCCESS)
        made(EXEC, slot % 4u, (uintptr_t)*exec, 0);
    return result;
}

/* `node_call`: 0 the call for allocations alone, 1 and 2 those for every kind of node. */
static CUresult add_allocation(struct operation op, unsigned node_call) {
    CUgraphNode node = NULL;
    int device = op.c < 160 ? (int)card_here() : op.c % (DEVICES + 1);
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
        .poolProps = {.allocType = op.c == 255 ? CU_MEM_ALLOCATION_TYPE_INVALID : CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {op.c == 254 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE, {device}}},
        .bytesize = bytes_of(op.b, (unsigned)device)};
    CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
                             .alloc = {.poolProps = parameters.poolProps, .bytesize = parameters.bytesize}};
    CUresult result = node_call == 0
                          ? cuGraphAddMemAllocNode(&node, graph_of(op.a), NULL, 0, op.c == 253 ? NULL : &parameters)
                      : node_call == 1 ? cuGraphAddNode(&node, graph_of(op.a), NULL, 0, &any)
                                       : cuGraphAddNode_v2(&node, graph_of(op.a), NULL, NULL, 0, &any);
    CUdeviceptr pointer = node_call ? any.alloc.dptr : parameters.dptr;
    return keep_pointer(result, op.a, &pointer);
}

static CUresult add_other(struct operation op) {
    CUgraphNode node = NULL;
    CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = {.dptr = handle_of(POINTER, op.b)}};
    switch (op.c % 4u) {
    case 0: return cuGraphAddEmptyNode(&node, graph_of(op.a), NULL, 0);
    case 1: return cuGraphAddNode(&node, graph_of(op.a), NULL, 0, &any);
    default: return add_allocation(op, op.c % 4u - 1);
    }
}

static CUresult instantiate(struct operation op) {
    CUgraphExec exec = NULL;
    CUgraph graph = graph_of(op.a);
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters = {.flags =
                                                    (op.b & 16 ? CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH : 0) |
                                                    (op.b & 32 ? CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD : 0),
                                                .hUploadStream = stream_of(op.c)};
    CUgraphExec *out = op.b == 255 ? NULL : &exec;
    switch (op.b % 5u) {
    case 0: return keep_exec(cuGraphInstantiate(out, graph, NULL, NULL, 0), op.a, &exec);
    case 1: return keep_exec(cuGraphInstantiate_v2(out, graph, NULL, NULL, 0), op.a, &exec);
    case 2: return keep_exec(cuGraphInstantiateWithParams(out, graph, op.b == 252 ? NULL : &parameters), op.a, &exec);
    case 3: return keep_exec(cuGraphInstantiateWithParams_ptsz(out, graph, &parameters), op.a, &exec);
    default:
        return keep_exec(
            cuGraphInstantiateWithFlags(out, graph, op.b & 16 ? CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH : 0),
            op.a, &exec);
    }
}

/* One thread at a time uses an executable graph: meanwhile the others do not find it. */
static CUresult run_graph(struct operation op, bool upload) {
    CUstream stream = stream_of(op.c);
    _Atomic uint64_t *slot = &slots[EXEC][op.a % 4u];
    bool taken = concurrent && op.a < 250;
    CUgraphExec exec = (CUgraphExec)(taken ? atomic_exchange(slot, 0) : handle_of(EXEC, op.a < 250 ? op.a % 4u : op.a));
    CUresult result = upload     ? op.b & 1 ? cuGraphUpload(exec, stream) : cuGraphUpload_ptsz(exec, stream)
                      : op.b & 1 ? cuGraphLaunch(exec, stream)
                                 : cuGraphLaunch_ptsz(exec, stream);
    if (taken)
        atomic_store(slot, (uintptr_t)exec);
    return result;
}

static CUresult reserve(struct operation op) {
    CUdevice device = op.b % (DEVICES + 1);
    cuuint64_t value = op.c >= 250;
    CUgraphMem_attribute attribute = (CUgraphMem_attribute)(op.c % 5u);
    if (op.a % 4u < 2)
        return cuDeviceGraphMemTrim(device);
    if (op.a % 4u == 2)
        return cuDeviceGetGraphMemAttribute(device, attribute, op.c == 255 ? NULL : &value);
    if (device < DEVICES)
        note_highest(device); /* which the next call may set back */
    return cuDeviceSetGraphMemAttribute(device, attribute, op.c == 255 ? NULL : &value);
}

static CUresult derive(struct operation op) {
    CUgraphExec exec = (CUgraphExec)handle_of(EXEC, op.b < 250 ? op.b % 4u : op.b);
    CUgraph graph = graph_of(op.a), clone = NULL;
    CUgraphNode error = NULL;
    CUgraphExecUpdateResult outcome;
    CUgraphExecUpdateResultInfo information;
    switch (op.c % 3u) {
    case 0: {
        CUresult result = cuGraphClone(op.c == 252 ? NULL : &clone, graph);
        if (result == CUDA_SUCCESS)
            made(GRAPH, op.b % 4u, (uintptr_t)clone, 0);
        return result;
    }
    case 1: return cuGraphExecUpdate(exec, graph, &error, &outcome);
    default: return cuGraphExecUpdate_v2(exec, graph, op.c == 254 ? NULL : &information);
    }
}

CUresult graph(struct operation op, unsigned which) {
    CUgraph created = NULL;
    CUgraphNode node = NULL;
    CUresult result;
    switch (which) {
    case 0:
        result = cuGraphCreate(op.c == 255 ? NULL : &created, op.c == 254);
        if (result == CUDA_SUCCESS)
            made(GRAPH, op.a % 4u, (uintptr_t)created, 0);
        return result;
    case 1: return add_allocation(op, 0);
    case 2: return cuGraphAddMemFreeNode(op.c == 255 ? NULL : &node, graph_of(op.a), NULL, 0, handle_of(POINTER, op.b));
    case 3: return add_other(op);
    case 4: return instantiate(op);
    case 5: return run_graph(op, false);
    case 6: return run_graph(op, true);
    case 7: return reserve(op);
    case 8:
        return op.b & 4 ? cuStreamBeginCaptureToGraph_ptsz(stream_of(op.c), graph_of(op.a), NULL, NULL, op.b == 255,
                                                           (CUstreamCaptureMode)(op.b % 4u))
                        : cuStreamBeginCaptureToGraph(stream_of(op.c), graph_of(op.a), NULL, NULL, 0,
                                                      (CUstreamCaptureMode)(op.b % 4u));
    default: return derive(op);
    }
}
