/* Memory that graphs allocate when they run.
 *
 * The driver reserves it at a launch or an upload and keeps it for later launches. As for pools, the reserve is
 * charged. Before a launch, the possible growth of the reserve is charged, too. The growth is no more than this graph
 * can have allocated at once. It is also no more than all launched graphs would need together, where graphs of one
 * stream take turns. */
#ifndef VGPU_GRAPHS_H
#define VGPU_GRAPHS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"
#include "reserves/pools.h"

#define VGPU_GRAPH_DEVICES 16

/* What one run of a graph can have allocated on each device. */
struct vgpu_graph {
    CUgraphExec exec;
    struct vgpu_graph *next;
    unsigned count;
    struct vgpu_graph_part {
        CUdevice device;
        bool contained; /* the graph frees all that it allocates */
        uint32_t era;   /* the era of the device's sums in which the part was added; 0: never */
        uint64_t bytes;
    } parts[VGPU_GRAPH_DEVICES];
};

/* A launch under way. */
struct vgpu_graph_launch {
    unsigned count;
    struct {
        struct vgpu_pool *pool;
        uint64_t growth;
    } parts[VGPU_GRAPH_DEVICES];
};

extern atomic_uint vgpu_graphs_known;

/* Reads the memory nodes of a graph. CUDA_SUCCESS and NULL: it has none. An error: there is no memory to remember them,
 * or the nodes cannot be read. */
CUresult vgpu_graph_read(CUgraph graph, struct vgpu_graph **out);
/* Chooses between two readings of one graph. If they are equal, keeps the earlier one, which may have been charged.
 * Frees the other. */
struct vgpu_graph *vgpu_graph_later(struct vgpu_graph *before, struct vgpu_graph *now);
/* Stores a reading under its handle (frees it if exec is NULL). Replaces what was known of an older graph with this
 * handle. */
void vgpu_graph_keep(struct vgpu_graph *graph, CUgraphExec exec);
/* Takes the graph out of the table; NULL: unknown. */
struct vgpu_graph *vgpu_graph_take(CUgraphExec exec);
struct vgpu_graph *vgpu_graph_find_slowly(CUgraphExec exec);
/* NULL: the graph allocates no limited memory. */
static inline struct vgpu_graph *vgpu_graph_find(CUgraphExec exec) {
    return atomic_load_explicit(&vgpu_graphs_known, memory_order_acquire) ? vgpu_graph_find_slowly(exec) : NULL;
}

/* Charges what a launch on this stream may make the driver reserve. False: refused, nothing is charged, and the launch
 * must not happen. */
bool vgpu_graph_charge(struct vgpu_graph *graph, CUstream stream, struct vgpu_graph_launch *launch);
/* Call after the launch, even if it failed. */
void vgpu_graph_settle(const struct vgpu_graph_launch *launch);
/* In a forked child: process.h. */
void vgpu_graphs_forget(void);
#endif
