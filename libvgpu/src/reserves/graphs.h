/* Memory that graphs allocate when they run.
 *
 * The driver reserves it at a launch or an upload and keeps it for later ones. What is charged is its reserve, as with
 * pools; before a launch also what the reserve may grow by: no more than this graph can have allocated at once, and no
 * more than all launched graphs would need together, of which those of one stream take turns. */
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
        bool contained; /* it frees all that it allocates */
        uint32_t era;   /* of the device's sums: in which it was added to them; 0: never */
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

/* Reads the memory nodes of a graph. CUDA_SUCCESS and NULL: it has none; an error: no memory to remember them, or nodes
 * that cannot be read. */
CUresult vgpu_graph_read(CUgraph graph, struct vgpu_graph **out);
/* Of two readings of one graph the one to keep: the earlier, which may have been charged, where they say the same.
 * Frees the other. */
struct vgpu_graph *vgpu_graph_later(struct vgpu_graph *before, struct vgpu_graph *now);
/* Remembers (or frees, when NULL is given for exec) what was read. What was known of an earlier handle of the same
 * value is forgotten. */
void vgpu_graph_keep(struct vgpu_graph *graph, CUgraphExec exec);
/* Takes it out of the table; NULL: not known. */
struct vgpu_graph *vgpu_graph_take(CUgraphExec exec);
struct vgpu_graph *vgpu_graph_find_slowly(CUgraphExec exec);
/* NULL: it allocates nothing that is limited. */
static inline struct vgpu_graph *vgpu_graph_find(CUgraphExec exec) {
    return atomic_load_explicit(&vgpu_graphs_known, memory_order_acquire) ? vgpu_graph_find_slowly(exec) : NULL;
}

/* Charges what a launch on this stream may make the driver reserve. False: refused, nothing is charged, the launch must
 * not be made. */
bool vgpu_graph_charge(struct vgpu_graph *graph, CUstream stream, struct vgpu_graph_launch *launch);
/* After the launch, whatever came of it. */
void vgpu_graph_settle(const struct vgpu_graph_launch *launch);
/* In a forked child: process.h. */
void vgpu_graphs_forget(void);
#endif
