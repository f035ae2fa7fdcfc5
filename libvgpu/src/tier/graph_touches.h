/* Which blocks the kernels of a graph touch, by the addresses in their parameters at the instantiation. A graph that is
 * updated later is assumed to touch the same blocks. */
#ifndef VGPU_GRAPH_TOUCHES_H
#define VGPU_GRAPH_TOUCHES_H
#include "loader/driver.h"

/* Reads the kernels of a graph that was instantiated as `exec`. Replaces what was known of an older graph with this
 * handle. */
void vgpu_graph_touches_read(CUgraph graph, CUgraphExec exec);
void vgpu_graph_touches_gone(CUgraphExec exec);
/* Before a launch of the graph. */
void vgpu_touched_graph(CUgraphExec exec);
/* In a forked child: process.h. */
void vgpu_graph_touches_forget(void);
#endif
