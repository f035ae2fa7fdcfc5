/* Changes of an executable graph by the program. */
#include <string.h>

#include "cuda/graph.h"

/* The difference that prevents the update of an executable graph to this graph; the address of an allocation can never
 * change. */
static CUgraphExecUpdateResult difference(CUgraphExec exec, CUgraph graph, CUgraphNode *at) {
    *at = NULL;
    if (exec->count != graph->count)
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < graph->count; i++) {
        const struct CUgraphNode_st *before = &exec->nodes[i];
        *at = graph->nodes[i];
        if (before->kind != (*at)->kind)
            return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        if ((before->kind == NODE_ALLOC || before->kind == NODE_FREE) && before->address != (*at)->address)
            return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
    *at = NULL;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *out) {
    ENTER();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    if (!object_is(exec, OBJECT_GRAPH_EXEC) || !object_is(graph, OBJECT_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    out->result = difference(exec, graph, &out->errorNode);
    if (out->result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    for (size_t i = 0; i < graph->count; i++)
        exec->nodes[i] = *graph->nodes[i];
    return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, CUgraphExecUpdateResult *out) {
    INJECT();
    CUgraphExecUpdateResultInfo info = {.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    CUresult result = cuGraphExecUpdate_v2(exec, graph, &info);
    if (error_node)
        *error_node = info.errorNode;
    if (out)
        *out = info.result;
    return result;
}

/* The executable copy of a node; NULL: the node came later, or is gone. */
static struct CUgraphNode_st *copy_of(CUgraphExec exec, CUgraphNode node) {
    if (!object_is(exec, OBJECT_GRAPH_EXEC) || !object_is(node, OBJECT_NODE) || node->graph != exec->source)
        return NULL;
    for (size_t i = 0; i < node->graph->count && i < exec->count; i++)
        if (node->graph->nodes[i] == node)
            return &exec->nodes[i];
    return NULL;
}

/* cuda.h: the context of the kernel cannot change. */
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    ENTER_CONTEXT(context);
    struct launch_shape shape;
    struct CUgraphNode_st *copy = copy_of(exec, node);
    if (!copy || copy->kind != NODE_KERNEL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = graph_kernel(params, context, &shape);
    if (!result && shape.function->module->context != copy->kernel.function->module->context)
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result)
        copy->kernel = shape;
    return result;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    INJECT();
    CUDA_KERNEL_NODE_PARAMS wide = {0};
    if (params)
        memcpy(&wide, params, sizeof *params);
    return cuGraphExecKernelNodeSetParams_v2(exec, node, params ? &wide : NULL);
}

/* cuda.h: only kernel, memset and memcpy nodes. */
static struct CUgraphNode_st *able(CUgraphExec exec, CUgraphNode node) {
    struct CUgraphNode_st *copy = copy_of(exec, node);
    return copy && (copy->kind == NODE_KERNEL || copy->kind == NODE_COPY || copy->kind == NODE_SET) ? copy : NULL;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled) {
    ENTER();
    struct CUgraphNode_st *copy = able(exec, node);
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    copy->disabled = !enabled;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled) {
    ENTER();
    const struct CUgraphNode_st *copy = able(exec, node);
    if (!copy || !enabled)
        return CUDA_ERROR_INVALID_VALUE;
    *enabled = !copy->disabled;
    return CUDA_SUCCESS;
}
