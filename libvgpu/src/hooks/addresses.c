/* Calls that look an address up and hand no work in. While a block moves, nothing is mapped at its address for a
 * moment, and the driver must not see that. Not affected: kernel parameters, which the driver does not treat as
 * addresses, and memory advice, which is only for managed memory and that does not move. */
#define _GNU_SOURCE
#include "hooks/gated.h"
#include "pacer/graph_cards.h"

/* Defines the hook `symbol`. */
#define INSIDE(symbol, parameters, arguments)                                                                          \
    CUresult symbol parameters {                                                                                       \
        CUDA_REAL(symbol);                                                                                             \
        if (!vgpu_gate_is_armed())                                                                                     \
            return real arguments;                                                                                     \
        vgpu_gate_enter();                                                                                             \
        CUresult result = real arguments;                                                                              \
        vgpu_gate_leave();                                                                                             \
        return result;                                                                                                 \
    }

#define NODE CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count

INSIDE(cuGraphAddMemcpyNode, (NODE, const CUDA_MEMCPY3D *copy, CUcontext context),
       (node, graph, dependencies, count, copy, context))
INSIDE(cuGraphAddMemsetNode, (NODE, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context),
       (node, graph, dependencies, count, fill, context))
INSIDE(cuGraphAddBatchMemOpNode, (NODE, const CUDA_BATCH_MEM_OP_NODE_PARAMS *list),
       (node, graph, dependencies, count, list))
INSIDE(cuGraphAddNode, (NODE, CUgraphNodeParams *parameters), (node, graph, dependencies, count, parameters))
INSIDE(cuGraphAddNode_v2,
       (CUgraphNode * node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
        CUgraphNodeParams *parameters),
       (node, graph, dependencies, edges, count, parameters))
INSIDE(cuGraphAddNode_v3,
       (CUgraphNode * node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
        CUgraphNodeParams *parameters),
       (node, graph, dependencies, edges, count, parameters))
INSIDE(cuGraphMemcpyNodeSetParams, (CUgraphNode node, const CUDA_MEMCPY3D *copy), (node, copy))
INSIDE(cuGraphMemsetNodeSetParams, (CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill), (node, fill))
INSIDE(cuGraphBatchMemOpNodeSetParams, (CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *list), (node, list))
INSIDE(cuGraphNodeSetParams, (CUgraphNode node, CUgraphNodeParams *parameters), (node, parameters))
INSIDE(cuGraphNodeSetParams_v2, (CUgraphNode node, CUgraphNodeParams *parameters), (node, parameters))
INSIDE(cuGraphExecMemcpyNodeSetParams,
       (CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *copy, CUcontext context), (exec, node, copy, context))
INSIDE(cuGraphExecMemsetNodeSetParams,
       (CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context),
       (exec, node, fill, context))
INSIDE(cuGraphExecBatchMemOpNodeSetParams,
       (CUgraphExec exec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *list), (exec, node, list))
INSIDE(cuGraphExecChildGraphNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraph child), (exec, node, child))
INSIDE(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *parameters),
       (exec, node, parameters))

static CUresult updated(CUresult result, CUgraph graph, CUgraphExec exec) {
    if (result == CUDA_SUCCESS)
        vgpu_graph_cards_read(graph, exec);
    return result;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, CUgraphExecUpdateResult *why) {
    CUDA_REAL(cuGraphExecUpdate);
    const bool gated = vgpu_gate_is_armed();
    if (gated)
        vgpu_gate_enter();
    const CUresult result = real(exec, graph, error_node, why);
    if (gated)
        vgpu_gate_leave();
    return updated(result, graph, exec);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *why) {
    CUDA_REAL(cuGraphExecUpdate_v2);
    const bool gated = vgpu_gate_is_armed();
    if (gated)
        vgpu_gate_enter();
    const CUresult result = real(exec, graph, why);
    if (gated)
        vgpu_gate_leave();
    return updated(result, graph, exec);
}

INSIDE(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at),
       (flags, location, at))
INSIDE(cuTexObjectCreate,
       (CUtexObject * object, const CUDA_RESOURCE_DESC *resource, const CUDA_TEXTURE_DESC *texture,
        const CUDA_RESOURCE_VIEW_DESC *view),
       (object, resource, texture, view))
INSIDE(cuTexRefSetAddress, (unsigned int *offset, CUtexref reference, CUdeviceptr_v1 at, unsigned int bytes),
       (offset, reference, at, bytes))
INSIDE(cuTexRefSetAddress_v2, (size_t *offset, CUtexref reference, CUdeviceptr at, size_t bytes),
       (offset, reference, at, bytes))
INSIDE(cuTexRefSetAddress2D,
       (CUtexref reference, const CUDA_ARRAY_DESCRIPTOR_v1 *what, CUdeviceptr_v1 at, unsigned int pitch),
       (reference, what, at, pitch))
INSIDE(cuTexRefSetAddress2D_v2, (CUtexref reference, const CUDA_ARRAY_DESCRIPTOR *what, CUdeviceptr at, size_t pitch),
       (reference, what, at, pitch))
INSIDE(cuTexRefSetAddress2D_v3, (CUtexref reference, const CUDA_ARRAY_DESCRIPTOR *what, CUdeviceptr at, size_t pitch),
       (reference, what, at, pitch))
