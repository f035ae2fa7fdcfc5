/* Which blocks the kernels of a graph touch, as the addresses stood in their parameters when it was instantiated. A
 * graph that is updated afterwards is taken to touch what it did. */
#ifndef VGPU_GRAPH_TOUCHES_H
#define VGPU_GRAPH_TOUCHES_H
#include "loader/driver.h"

/* Reads the kernels of a graph that has been instantiated as `exec`; what was known of an earlier handle of that value
 * is forgotten. */
void vgpu_graph_touches_read(CUgraph graph, CUgraphExec exec);
void vgpu_graph_touches_gone(CUgraphExec exec);
/* Before a launch of the graph. */
void vgpu_touched_graph(CUgraphExec exec);
/* In a forked child: process.h. */
void vgpu_graph_touches_forget(void);
#endif
