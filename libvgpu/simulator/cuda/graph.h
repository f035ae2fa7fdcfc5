/* Graphs as capture.c builds them and graphs.c runs them. */
#ifndef VGPU_SIMULATOR_GRAPH_H
#define VGPU_SIMULATOR_GRAPH_H
#include "cuda/driver.h"

enum node_kind { NODE_EMPTY, NODE_KERNEL, NODE_COPY, NODE_SET, NODE_HOST, NODE_ALLOC, NODE_FREE };

struct CUgraphNode_st {
    struct object object;
    CUgraph graph;
    enum node_kind kind;
    union {
        struct launch_shape kernel;
        struct {
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
};

CUgraphNode graph_add(CUgraph graph, enum node_kind kind);
void graph_free(CUgraph graph);
/* capture.c */
CUresult capture_nodes(CUstream stream, const struct CUgraphNode_st *nodes, size_t count);
#endif
