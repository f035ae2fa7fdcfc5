/* Finds the blocks that the kernels of a graph touch. */
#define _GNU_SOURCE
#include "tier/graph_touches.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/spin.h"
#include "ledger/charge.h"
#include "tier/blocks.h"
#include "tier/touched.h"

#define BUCKETS 256u
#define MOST 4096u /* blocks of one graph */

struct touches {
    struct touches *next;
    CUgraphExec exec;
    uint32_t count, room;
    CUdeviceptr *at; /* one address of each block, in the order of the blocks' numbers at the instantiation */
    uint32_t *blocks;
};

static struct touches *buckets[BUCKETS];
static vgpu_spin lock;

void vgpu_graph_touches_forget(void) {
    memset(buckets, 0, sizeof buckets);
    atomic_store(&lock, 0);
}

static struct touches **place(CUgraphExec exec) {
    struct touches **at = &buckets[((uintptr_t)exec * 0x9e3779b97f4a7c15ull) >> 56];
    while (*at && (*at)->exec != exec)
        at = &(*at)->next;
    return at;
}

static void drop(struct touches *touches) {
    if (!touches)
        return;
    free(touches->at);
    free(touches->blocks);
    free(touches);
}

static bool make_room(struct touches *touches) {
    if (touches->count < touches->room)
        return true;
    const uint32_t room = touches->room ? touches->room * 2 : 16;
    CUdeviceptr *at = realloc(touches->at, room * sizeof *at);
    touches->at = at ? at : touches->at;
    uint32_t *blocks = at ? realloc(touches->blocks, room * sizeof *blocks) : NULL;
    touches->blocks = blocks ? blocks : touches->blocks;
    touches->room = blocks ? room : touches->room;
    return blocks != NULL;
}

static void add(struct touches *touches, uint32_t block, CUdeviceptr at) {
    uint32_t low = 0, high = touches->count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (touches->blocks[middle] < block)
            low = middle + 1;
        else
            high = middle;
    }
    if ((low < touches->count && touches->blocks[low] == block) || touches->count == MOST || !make_room(touches))
        return;
    memmove(&touches->blocks[low + 1], &touches->blocks[low], (touches->count - low) * sizeof *touches->blocks);
    memmove(&touches->at[low + 1], &touches->at[low], (touches->count - low) * sizeof *touches->at);
    touches->blocks[low] = block;
    touches->at[low] = at;
    touches->count++;
}

static void read_graph(struct touches *touches, CUgraph graph);

static void read_node(struct touches *touches, CUgraphNode node) {
    CUgraphNodeType type;
    CUgraph child;
    if (DRIVER(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && DRIVER(cuGraphChildGraphNodeGetGraph) &&
        DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        read_graph(touches, child);
    CUDA_KERNEL_NODE_PARAMS_v1 kernel = {0};
    if (type != CU_GRAPH_NODE_TYPE_KERNEL || DRIVER(cuGraphKernelNodeGetParams)(node, &kernel) != CUDA_SUCCESS ||
        !kernel.func)
        return;
    struct vgpu_noting noting;
    vgpu_note_parameters(&noting, kernel.func, kernel.kernelParams, kernel.extra);
    for (uint32_t i = 0; i < noting.count; i++)
        add(touches, noting.blocks[i], noting.at[i]);
}

static void read_graph(struct touches *touches, CUgraph graph) {
    size_t count = 0;
    if (DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || !count)
        return;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (nodes && DRIVER(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS)
        for (size_t i = 0; i < count; i++)
            read_node(touches, nodes[i]);
    free(nodes);
}

void vgpu_graph_touches_read(CUgraph graph, CUgraphExec exec) {
    const int kept = errno;
    vgpu_graph_touches_gone(exec);
    struct touches *touches = NULL;
    if (vgpu_tier_any() && DRIVER(cuGraphGetNodes) && DRIVER(cuGraphNodeGetType) && DRIVER(cuGraphKernelNodeGetParams))
        touches = calloc(1, sizeof *touches);
    if (touches)
        read_graph(touches, graph);
    if (touches && touches->count) {
        touches->exec = exec;
        vgpu_spin_lock(&lock);
        *place(exec) = touches;
        vgpu_spin_unlock(&lock);
    } else {
        drop(touches);
    }
    errno = kept;
}

void vgpu_graph_touches_gone(CUgraphExec exec) {
    vgpu_own_tables();
    vgpu_spin_lock(&lock);
    struct touches **at = place(exec), *touches = *at;
    if (touches)
        *at = touches->next;
    vgpu_spin_unlock(&lock);
    drop(touches);
}

void vgpu_touched_graph(CUgraphExec exec) {
    if (!vgpu_tier_any())
        return;
    const int kept = errno;
    vgpu_own_tables();
    vgpu_spin_lock(&lock);
    const struct touches *touches = *place(exec);
    if (touches)
        vgpu_touched_at(touches->at, touches->count);
    vgpu_spin_unlock(&lock);
    errno = kept;
}
