/* Graphs as capture.c builds them and graphs.c runs them. */
#ifndef VGPU_SIMULATOR_GRAPH_H
#define VGPU_SIMULATOR_GRAPH_H
#include "cuda/driver.h"

enum node_kind { NODE_EMPTY, NODE_KERNEL, NODE_COPY, NODE_SET, NODE_HOST, NODE_ALLOC, NODE_FREE };

struct CUgraphNode_st {
    struct object object;
    CUgraph graph;
    enum node_kind kind;
    bool disabled; /* only in an executable graph */
    union {
        struct launch_shape kernel;
        struct {
            struct sides sides;
            CUdeviceptr to, from;
            size_t bytes;
        } copy;
        struct {
            CUdeviceptr to;
            size_t pitch, width, height;
            unsigned value, element;
        } set;
        struct {
            CUhostFn function;
            void *data;
        } host;
        CUdeviceptr address; /* of the allocation, or of the freed memory */
    };
};

struct CUgraph_st {
    struct object object;
    CUgraphNode *nodes;
    size_t count, room;
    CUgraphExec exec; /* the executable graph of a graph with memory nodes, of which there can be only one */
    bool capturing;   /* a stale handle with the same value must not destroy it */
};

struct CUgraphExec_st {
    struct object object;
    CUcontext context;
    CUgraph source;
    unsigned long long flags;
    size_t count;
    struct CUgraphNode_st *nodes;  /* copies, in execution order */
    bool memory;                   /* there are memory nodes */
    uint32_t cards;                /* a bit for each card on which the graph allocates */
    CUstream elsewhere[SIM_CARDS]; /* streams for its kernels on cards other than the launch's card */
};

CUgraphNode graph_add(CUgraph graph, enum node_kind kind);
/* Copies everything except the node's identity and place. */
void node_copy(CUgraphNode to, const struct CUgraphNode_st *from);
/* Reads what a kernel node runs; `context`: used if nothing else names the card. */
CUresult graph_kernel(const CUDA_KERNEL_NODE_PARAMS *params, CUcontext context, struct launch_shape *shape);
void graph_free(CUgraph graph);
/* capture.c */
CUresult capture_exec(CUstream stream, CUgraphExec exec);

/* graph_memory.c */
bool graph_allocates(CUgraph graph);
/* The address of a new allocation node: that of an earlier allocation of the same size that the graph has freed, else a
 * new one; 0: no room. */
CUdeviceptr graph_address(CUgraph graph, CUcontext context, size_t bytes);
/* CUDA_ERROR_INVALID_VALUE if no free node of the graph can name this address. */
CUresult graph_address_check(CUgraph graph, CUdeviceptr address);
/* The cards on which the nodes allocate. */
uint32_t graph_cards(const struct CUgraphNode_st *nodes, size_t count);
/* Before a launch: memory that an earlier launch left allocated is freed, if the graph was instantiated so; else it is
 * an error. */
CUresult graph_memory_clear(CUgraphExec exec);
/* Before a launch or an upload: reserves on the card what the graph needs beyond the reserve of this process's
 * graphs. */
CUresult graph_memory_reserve(CUgraphExec exec, CUstream stream);
/* After a launch: until the stream's current work is done, no other graph can use that memory. */
void graph_memory_occupied(CUgraphExec exec, CUstream stream);
CUresult graph_memory_back(CUdeviceptr address);
#endif
