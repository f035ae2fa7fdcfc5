/* Remembers the cards on which the nodes of a graph run. */
#include "pacer/graph_cards.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/spin.h"
#include "ledger/charge.h"

#define ALL UINT32_MAX
#define PLACES 256u /* power of two */

/* What is known of a captured graph, or of an executable graph. */
struct known {
    struct known *next;
    const void *handle;
    cuuint64_t capture; /* the capture that filled the graph; 0: executable graph */
    size_t launches;    /* recorded launches */
    uint32_t cards;
};

static struct known *table[PLACES];
static vgpu_spin lock;

void vgpu_graph_cards_forget(void) {
    for (unsigned i = 0; i < PLACES; i++)
        table[i] = NULL;
    atomic_store(&lock, 0);
}

static bool several(void) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    return limits && limits->card_count > 1;
}

static struct known **place(const void *handle) {
    struct known **at = &table[(uint64_t)(uintptr_t)handle * 0x9e3779b97f4a7c15ull >> 56];
    while (*at && (*at)->handle != handle)
        at = &(*at)->next;
    return at;
}

/* With the lock held. NULL: no memory; then the graph stays unknown. */
static struct known *make(const void *handle) {
    struct known **at = place(handle);
    if (!*at && (*at = calloc(1, sizeof **at)))
        (*at)->handle = handle;
    return *at;
}

void vgpu_graph_cards_captured(CUstream stream, unsigned card) {
    CUstreamCaptureStatus status;
    cuuint64_t id = 0;
    CUgraph graph = NULL;
    __typeof__(&cuStreamGetCaptureInfo_v2) ask = DRIVER(cuStreamGetCaptureInfo_v2);
    if (!several() || !ask || ask(stream, &status, &id, &graph, NULL, NULL) != CUDA_SUCCESS || !graph)
        return;
    const int kept = errno;
    vgpu_spin_lock(&lock);
    struct known *known = make(graph);
    if (known && known->capture != id) {
        known->capture = id;
        known->launches = 0;
        known->cards = 0;
    }
    if (known) {
        known->launches++;
        known->cards |= card < 32 ? 1u << card : 0;
    }
    vgpu_spin_unlock(&lock);
    errno = kept;
}

/* False: the driver does not say. */
static bool count_kernels(CUgraph graph, size_t *kernels) {
    size_t count = 0;
    if (!DRIVER(cuGraphGetNodes) || !DRIVER(cuGraphNodeGetType) ||
        DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS)
        return false;
    CUgraphNode *nodes = calloc(count ? count : 1, sizeof *nodes);
    bool told = nodes && (!count || DRIVER(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS);
    for (size_t i = 0; i < count && told; i++) {
        CUgraphNodeType type;
        told = DRIVER(cuGraphNodeGetType)(nodes[i], &type) == CUDA_SUCCESS && type != CU_GRAPH_NODE_TYPE_GRAPH &&
               type != CU_GRAPH_NODE_TYPE_CONDITIONAL;
        *kernels += told && type == CU_GRAPH_NODE_TYPE_KERNEL;
    }
    free(nodes);
    return told;
}

/* The driver names the function of a node, not its card. The cards are known only if every kernel node came from a
 * recorded launch. */
void vgpu_graph_cards_read(CUgraph graph, CUgraphExec exec) {
    size_t kernels = 0;
    if (!several())
        return;
    const int kept = errno;
    const bool told = count_kernels(graph, &kernels);
    vgpu_spin_lock(&lock);
    const struct known *captured = *place(graph);
    const uint32_t cards = !told                                                            ? ALL
                           : !kernels                                                       ? 0
                           : captured && captured->capture && captured->launches == kernels ? captured->cards
                                                                                            : ALL;
    struct known *known = make(exec);
    if (known) {
        known->capture = 0;
        known->cards |= cards;
    }
    vgpu_spin_unlock(&lock);
    errno = kept;
}

void vgpu_graph_cards_gone(CUgraphExec exec) {
    vgpu_own_tables();
    vgpu_spin_lock(&lock);
    struct known **at = place(exec), *known = *at;
    if (known)
        *at = known->next;
    vgpu_spin_unlock(&lock);
    free(known);
}

uint32_t vgpu_graph_cards_of(CUgraphExec exec) {
    if (!several())
        return 0;
    vgpu_spin_lock(&lock);
    const struct known *known = *place(exec);
    const uint32_t cards = known ? known->cards : ALL;
    vgpu_spin_unlock(&lock);
    return cards;
}
