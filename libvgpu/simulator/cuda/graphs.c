/* Graphs of kernels, copies, fills, host functions and allocations. */
#include <stdlib.h>
#include <string.h>

#include "cuda/graph.h"

_Static_assert(sizeof(struct CUgraphNode_st) <= 512, "larger than a slot of objects.c");

CUgraphNode graph_add(CUgraph graph, enum node_kind kind) {
    if (graph->count == graph->room) {
        size_t room = graph->room ? graph->room * 2 : 16;
        CUgraphNode *nodes = realloc(graph->nodes, room * sizeof *nodes);
        if (!nodes)
            return NULL;
        graph->nodes = nodes;
        graph->room = room;
    }
    CUgraphNode node = object_new(OBJECT_NODE);
    if (node) {
        node->graph = graph;
        node->kind = kind;
        graph->nodes[graph->count++] = node;
    }
    return node;
}

void node_copy(CUgraphNode to, const struct CUgraphNode_st *from) {
    struct CUgraphNode_st copy = *from;
    copy.object = to->object;
    copy.graph = to->graph;
    *to = copy;
}

void graph_free(CUgraph graph) {
    for (size_t i = 0; i < graph->count; i++)
        object_free(graph->nodes[i]);
    free(graph->nodes);
    object_free(graph);
}

CUresult cuGraphCreate(CUgraph *out, unsigned int flags) {
    ENTER();
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = object_new(OBJECT_GRAPH);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphDestroy(CUgraph graph) {
    ENTER();
    if (!object_is(graph, OBJECT_GRAPH) || graph->capturing)
        return CUDA_ERROR_INVALID_VALUE;
    graph_free(graph);
    return CUDA_SUCCESS;
}

/* cuda.h: graphs with memory nodes cannot be cloned. */
CUresult cuGraphClone(CUgraph *out, CUgraph graph) {
    ENTER();
    if (!out || !object_is(graph, OBJECT_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    if (graph_allocates(graph))
        return CUDA_ERROR_NOT_SUPPORTED;
    CUgraph clone = object_new(OBJECT_GRAPH);
    for (size_t i = 0; clone && i < graph->count; i++) {
        CUgraphNode node = graph_add(clone, graph->nodes[i]->kind);
        if (!node) {
            graph_free(clone);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        node_copy(node, graph->nodes[i]);
    }
    *out = clone;
    return clone ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Nodes run in the order of their creation. That satisfies every dependency, because a dependency can only name an
 * earlier node. */
static CUresult explicit_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              enum node_kind kind) {
    ENTER();
    if (!out || !object_is(graph, OBJECT_GRAPH) || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!object_is(dependencies[i], OBJECT_NODE) || dependencies[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    *out = graph_add(graph, kind);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult graph_kernel(const CUDA_KERNEL_NODE_PARAMS *params, CUcontext context, struct launch_shape *shape) {
    CUfunction function;
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    if (!params->func && params->ctx)
        context = object_is(params->ctx, OBJECT_CONTEXT) && params->ctx->green
                      ? params->ctx->base
                      : params->ctx; /* cuda.h: for a kernel of a library */
    CUresult result = object_is(context, OBJECT_CONTEXT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (!result)
        result = function_resolve(params->func ? params->func : (CUfunction)params->kern, context, &function);
    if (result)
        return result;
    *shape = (struct launch_shape){.function = function,
                                   .grid = {params->gridDimX, params->gridDimY, params->gridDimZ},
                                   .block = {params->blockDimX, params->blockDimY, params->blockDimZ},
                                   .shared = params->sharedMemBytes,
                                   .argument = function_argument(function, params->kernelParams, params->extra)};
    touch_read(shape, params->kernelParams, params->extra);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS *params) {
    ENTER_CONTEXT(context);
    struct launch_shape shape;
    CUresult result = graph_kernel(params, context, &shape);
    if (!result)
        result = explicit_node(out, graph, dependencies, count, NODE_KERNEL);
    if (!result)
        (*out)->kernel = shape;
    return result;
}

CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    INJECT();
    CUDA_KERNEL_NODE_PARAMS wide = {0};
    if (params)
        memcpy(&wide, params, sizeof *params);
    return cuGraphAddKernelNode_v2(out, graph, dependencies, count, params ? &wide : NULL);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count) {
    INJECT();
    return explicit_node(out, graph, dependencies, count, NODE_EMPTY);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    ENTER_CONTEXT(context);
    if (!params || !params->bytesize || params->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        params->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    int device = params->poolProps.location.id;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (context->device != device)
        context = driver.primary[device];
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (params->bytesize > driver.sim.profile->total)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr address = object_is(graph, OBJECT_GRAPH) ? graph_address(graph, context, params->bytesize) : 0;
    if (!address)
        return object_is(graph, OBJECT_GRAPH) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    CUresult result = explicit_node(out, graph, dependencies, count, NODE_ALLOC);
    if (!result)
        params->dptr = (*out)->address = address;
    return result;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *out) {
    ENTER();
    if (!out || !object_is(node, OBJECT_NODE) || node->kind != NODE_ALLOC)
        return CUDA_ERROR_INVALID_VALUE;
    struct block *block = block_of_graph(node->address);
    if (!block)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_MEM_ALLOC_NODE_PARAMS){
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = block->context->device}},
        .bytesize = block->size,
        .dptr = node->address,
    };
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUdeviceptr address) {
    INJECT();
    CUresult result = object_is(graph, OBJECT_GRAPH) ? graph_address_check(graph, address) : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = explicit_node(out, graph, dependencies, count, NODE_FREE);
    if (!result)
        (*out)->address = address;
    return result;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *out) {
    ENTER();
    if (!out || !object_is(node, OBJECT_NODE) || node->kind != NODE_FREE)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node->address;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                        CUgraphNodeParams *params) {
    INJECT();
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    switch (params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        const CUDA_KERNEL_NODE_PARAMS_v3 *kernel = &params->kernel;
        return cuGraphAddKernelNode_v2(out, graph, dependencies, count,
                                       &(CUDA_KERNEL_NODE_PARAMS){.func = kernel->func,
                                                                  .kern = kernel->kern,
                                                                  .ctx = kernel->ctx,
                                                                  .gridDimX = kernel->gridDimX,
                                                                  .gridDimY = kernel->gridDimY,
                                                                  .gridDimZ = kernel->gridDimZ,
                                                                  .blockDimX = kernel->blockDimX,
                                                                  .blockDimY = kernel->blockDimY,
                                                                  .blockDimZ = kernel->blockDimZ,
                                                                  .sharedMemBytes = kernel->sharedMemBytes});
    }
    case CU_GRAPH_NODE_TYPE_EMPTY: return cuGraphAddEmptyNode(out, graph, dependencies, count);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
        CUDA_MEM_ALLOC_NODE_PARAMS old;
        memcpy(&old, &params->alloc, sizeof old); /* the second version has the same fields */
        CUresult result = cuGraphAddMemAllocNode(out, graph, dependencies, count, &old);
        params->alloc.dptr = old.dptr;
        return result;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(out, graph, dependencies, count, params->free.dptr);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params) {
    INJECT();
    (void)edges;
    return cuGraphAddNode(out, graph, dependencies, count, params);
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    ENTER();
    if (!count || !object_is(graph, OBJECT_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
    if (!nodes || *count > graph->count)
        *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    static const CUgraphNodeType types[] = {
        [NODE_EMPTY] = CU_GRAPH_NODE_TYPE_EMPTY,  [NODE_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL,
        [NODE_COPY] = CU_GRAPH_NODE_TYPE_MEMCPY,  [NODE_SET] = CU_GRAPH_NODE_TYPE_MEMSET,
        [NODE_HOST] = CU_GRAPH_NODE_TYPE_HOST,    [NODE_ALLOC] = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
        [NODE_FREE] = CU_GRAPH_NODE_TYPE_MEM_FREE};
    ENTER();
    if (!type || !object_is(node, OBJECT_NODE))
        return CUDA_ERROR_INVALID_VALUE;
    *type = types[node->kind];
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    ENTER_CONTEXT(context);
    if (!out || !object_is(graph, OBJECT_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    bool memory = graph_allocates(graph);
    if (memory && graph->exec)
        return CUDA_ERROR_NOT_SUPPORTED; /* cuda.h: only one instantiation may exist at any point in time */
    CUgraphExec exec = object_new(OBJECT_GRAPH_EXEC);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->context = context;
    exec->source = graph;
    exec->memory = memory;
    exec->flags = flags;
    exec->nodes = calloc(graph->count + 1, sizeof *exec->nodes);
    if (!exec->nodes) {
        object_free(exec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < graph->count; i++)
        exec->nodes[exec->count++] = *graph->nodes[i];
    exec->cards = graph_cards(exec->nodes, exec->count);
    if (memory)
        graph->exec = exec;
    *out = exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    INJECT();
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuGraphInstantiateWithFlags(out, graph, params->flags);
    if (!result && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD &&
        (result = cuGraphUpload(*out, params->hUploadStream)))
        cuGraphExecDestroy(*out);
    params->result_out = result ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return result;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t size) {
    INJECT();
    if (error_node)
        *error_node = NULL;
    if (log && size)
        *log = 0;
    return cuGraphInstantiateWithFlags(out, graph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t size) {
    INJECT();
    return cuGraphInstantiate_v2(out, graph, error_node, log, size);
}

/* Runs a kernel of another card on that card, behind the nodes before it. */
static CUresult run_kernel(CUgraphExec exec, CUstream stream, const struct launch_shape *shape) {
    CUcontext context = shape->function->module->context;
    if (context->card == stream->context->card)
        return stream_launch(stream, shape);
    CUstream *there = &exec->elsewhere[context->card];
    if (!object_is(*there, OBJECT_STREAM) || (*there)->context != context)
        *there = stream_new(context, CU_STREAM_NON_BLOCKING, 0);
    if (!*there)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream_follow(*there, stream);
    CUresult result = stream_launch(*there, shape);
    stream_follow(stream, *there);
    return result;
}

static CUresult run(CUgraphExec exec, CUstream stream, const struct CUgraphNode_st *node) {
    switch (node->kind) {
    case NODE_KERNEL: return run_kernel(exec, stream, &node->kernel);
    case NODE_COPY:
        bus_copy(stream, node->copy.to, node->copy.from, node->copy.bytes, 0);
        return copy_bytes(node->copy.sides, node->copy.to, node->copy.from, node->copy.bytes);
    case NODE_SET:
        bus_set(stream, node->set.to, (uint64_t)node->set.width * node->set.element * node->set.height);
        return set_elements(stream->context->device, node->set.to, node->set.pitch, node->set.value, node->set.element,
                            node->set.width, node->set.height);
    case NODE_HOST: return host_launch(stream, node->host.function, node->host.data);
    case NODE_ALLOC: return graph_memory_back(node->address);
    case NODE_FREE: return memory_free(node->address);
    default: return CUDA_SUCCESS;
    }
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    if (!object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    result = capture_exec(stream, exec);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    result = graph_memory_clear(exec);
    if (!result)
        result = graph_memory_reserve(exec, stream);
    if (result)
        return result;
    for (size_t i = 0; i < exec->count && !result; i++)
        if (!exec->nodes[i].disabled)
            result = run(exec, stream, &exec->nodes[i]);
    graph_memory_occupied(exec, stream);
    if (!result)
        sim_wait_queued(&driver.sim, stream->context->card);
    return result;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream handle) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !object_is(exec, OBJECT_GRAPH_EXEC))
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    if (stream->capture && strict_about("captures"))
        return capture_forbids(stream);
    result = graph_memory_reserve(exec, stream);
    if (!result)
        graph_memory_occupied(exec, stream);
    return result;
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags) {
    ENTER();
    if (!flags || !object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    ENTER();
    if (!object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    if (object_is(exec->source, OBJECT_GRAPH) && exec->source->exec == exec)
        exec->source->exec = NULL;
    for (int card = 0; card < SIM_CARDS; card++)
        if (object_is(exec->elsewhere[card], OBJECT_STREAM))
            object_free(exec->elsewhere[card]);
    free(exec->nodes);
    object_free(exec);
    return CUDA_SUCCESS;
}
