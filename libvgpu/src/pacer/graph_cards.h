/* The cards on which a graph runs, where the limits list several cards. A node runs in the context of its function or
 * stream, not in the context of the launch stream. Bit masks by index in the limits. */
#ifndef VGPU_GRAPH_CARDS_H
#define VGPU_GRAPH_CARDS_H
#include <stdint.h>

#include "loader/driver.h"

/* A capturing stream records a launch on this card. */
void vgpu_graph_cards_captured(CUstream stream, unsigned card);
/* `graph` has been instantiated as `exec`, or has updated `exec`. */
void vgpu_graph_cards_read(CUgraph graph, CUgraphExec exec);
void vgpu_graph_cards_gone(CUgraphExec exec);
/* The cards on which the graph runs, as far as known; all cards if the driver does not say; 0: there is only one
 * card. */
uint32_t vgpu_graph_cards_of(CUgraphExec exec);
/* In a forked child: process.h. */
void vgpu_graph_cards_forget(void);
#endif
