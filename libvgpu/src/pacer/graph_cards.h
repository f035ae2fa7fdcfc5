/* On which cards graphs run, where the limits list several: a node runs in the context of its function or stream, not
 * in that of the stream on which its graph is launched. Bit masks by index in the limits. */
#ifndef VGPU_GRAPH_CARDS_H
#define VGPU_GRAPH_CARDS_H
#include <stdint.h>

#include "loader/driver.h"

/* A launch in this context's card is recorded on a capturing stream. */
void vgpu_graph_cards_captured(CUstream stream, unsigned card);
/* The graph has been instantiated as, or has updated, this one. */
void vgpu_graph_cards_read(CUgraph graph, CUgraphExec exec);
void vgpu_graph_cards_gone(CUgraphExec exec);
/* Cards on which it runs, as far as is known; all, where the driver does not say; 0: there is one card. */
uint32_t vgpu_graph_cards_of(CUgraphExec exec);
/* In a forked child: process.h. */
void vgpu_graph_cards_forget(void);
#endif
