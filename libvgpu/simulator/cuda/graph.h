/* Graphs as capture.c builds them and graphs.c runs them. */
#ifndef VGPU_SIMULATOR_GRAPH_H
#define VGPU_SIMULATOR_GRAPH_H
#include "cuda/driver.h"

enum node_kind { NODE_EMPTY, NODE_KERNEL, NODE_COPY, NODE_SET, NODE_HOST, NODE_ALLOC, NODE_FREE };

struct CUgraphNode_st {
    struct object object;
    CUgraph graph;
    enum node_kind kind;
    bool disabled; /* of an executable graph */
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
        CUdeviceptr address; /* of an allocation or of what is freed */
    };
};

struct CUgraph_st {
    struct object object;
    CUgraphNode *nodes;
    size_t count, room;
    CUgraphExec exec; /* that stands for a graph with memory nodes, of which there can be one */
    bool capturing;   /* not to be destroyed by an old handle of the same value */
};

struct CUgraphExec_st {
    struct object object;
    CUcontext context;
    CUgraph source;
    unsigned long long flags;
    size_t count;
    struct CUgraphNode_st *nodes;  /* copies, in the order in which they run */
    bool memory;                   /* whether there are memory nodes */
    uint32_t cards;                /* a bit for each that the graph allocates on */
    CUstream elsewhere[SIM_CARDS]; /* where its kernels of other cards than that of its launch run */
};

CUgraphNode graph_add(CUgraph graph, enum node_kind kind);
/* All but what the node is and where. */
void node_copy(CUgraphNode to, const struct CUgraphNode_st *from);
/* What a node of this kernel runs; `context`: where nothing else says on which card. */
CUresult graph_kernel(const CUDA_KERNEL_NODE_PARAMS *params, CUcontext context, struct launch_shape *shape);
void graph_free(CUgraph graph);
/* capture.c */
CUresult capture_exec(CUstream stream, CUgraphExec exec);

/* graph_memory.c */
bool graph_allocates(CUgraph graph);
/* The address of a new allocation node: that of an earlier one of the same size that the graph has freed, or a new one;
 * 0: no room. */
CUdeviceptr graph_address(CUgraph graph, CUcontext context, size_t bytes);
/* CUDA_ERROR_INVALID_VALUE where a free node of the graph cannot name this address. */
CUresult graph_address_check(CUgraph graph, CUdeviceptr address);
/* Which cards the nodes allocate on. */
uint32_t graph_cards(const struct CUgraphNode_st *nodes, size_t count);
/* Before a launch: what an earlier one has left allocated is freed if the graph was instantiated so, else it is an
 * error. */
CUresult graph_memory_clear(CUgraphExec exec);
/* Before a launch or an upload: the card gives what the graph needs beyond what the graphs of this process have
 * reserved. */
CUresult graph_memory_reserve(CUgraphExec exec, CUstream stream);
/* After it: until what the stream has now to do is done, nobody else can have that memory. */
void graph_memory_occupied(CUgraphExec exec, CUstream stream);
CUresult graph_memory_back(CUdeviceptr address);
#endif
