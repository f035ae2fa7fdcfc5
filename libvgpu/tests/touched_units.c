/* What is noted of launches and graphs, against a driver and a table of blocks that are played here: prints nothing and
 * ends with 0, or names the check that failed. */
#define _GNU_SOURCE
#include "tier/touched.h"

#include <string.h>

#include "check.h"
#include "ledger/charge.h"
#include "tier/graph_touches.h"
#include "tier/parameters.h"
#include "tier/tier.h"

#define BASE(i) ((CUdeviceptr)((i) + 1) << VGPU_TIER_SHIFT)
#define BLOCKS 8u
#define FUNCTION(i) ((CUfunction)(uintptr_t)(0x1000 * ((i) + 1)))

_Atomic(struct vgpu_local *) vgpu_local_memory;
_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
_Atomic(_Atomic uint32_t *) vgpu_tier_leaves[VGPU_TIER_LEAVES];
atomic_bool vgpu_tier_used;
static _Atomic uint32_t leaf[1u << (VGPU_TIER_LEAF_SHIFT - VGPU_TIER_SHIFT)];
static struct vgpu_tier_record records[BLOCKS];
static struct vgpu_tier_block entries[2][BLOCKS];
static struct vgpu_tier_card cards[2];
static bool locked_by_another;

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

enum vgpu_mode vgpu_enforcement_slowly(void) {
    return VGPU_REGION;
}

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

enum vgpu_tier_mode vgpu_tier_mode(void) {
    return VGPU_TIER_MOVABLE;
}

struct vgpu_tier_record *vgpu_tier_record(uint32_t number) {
    CHECK(number < BLOCKS);
    return &records[number];
}

struct vgpu_tier_card *vgpu_tier_card(unsigned card) {
    return card < 2 ? &cards[card] : NULL;
}

bool vgpu_tier_try(void) {
    return !locked_by_another;
}

void vgpu_tier_unlock(void) {
}

/* Blocks 0 to 5 on card 0, 6 and 7 on card 1. */
static void make_blocks(void) {
    vgpu_tier_leaves[0] = leaf;
    vgpu_tier_used = true;
    for (unsigned i = 0; i < 2; i++)
        vgpu_tier_begin(&cards[i].policy, entries[i], BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        records[i] =
            (struct vgpu_tier_record){.base = BASE(i), .bytes = VGPU_TIER_GRANULE, .card = i > 5, .movable = true};
        records[i].entry = vgpu_tier_add(&cards[i > 5].policy, VGPU_TIER_GRANULE, false, false);
        leaf[i + 1] = ~i;
    }
}

/* The driver: function 0 has three parameters, of 8, 4 and 24 bytes; function 1 none; 2 is a kernel's handle with one.
 */
static int asked;

static CUresult function_info(CUfunction function, size_t index, size_t *offset, size_t *size) {
    static const size_t offsets[] = {0, 8, 16}, sizes[] = {8, 4, 24};
    asked++;
    if (function == FUNCTION(2))
        return CUDA_ERROR_INVALID_HANDLE;
    if (function != FUNCTION(0) || index > 2)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = offsets[index];
    *size = sizes[index];
    return CUDA_SUCCESS;
}

static CUresult kernel_info(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    if ((CUfunction)kernel != FUNCTION(2) || index)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *size = 8;
    return CUDA_SUCCESS;
}

/* A graph of a kernel, and of a child graph with another one. */
static CUdeviceptr in_graph = BASE(3) + 8, in_child = BASE(7);
static void *of_node[] = {&in_graph}, *of_child[] = {&in_child};

static CUresult get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    *count = graph == (CUgraph)1 ? 2 : 1;
    if (nodes) {
        nodes[0] = graph == (CUgraph)1 ? (CUgraphNode)1 : (CUgraphNode)3;
        if (*count > 1)
            nodes[1] = (CUgraphNode)2;
    }
    return CUDA_SUCCESS;
}

static CUresult node_type(CUgraphNode node, CUgraphNodeType *type) {
    *type = node == (CUgraphNode)2 ? CU_GRAPH_NODE_TYPE_GRAPH : CU_GRAPH_NODE_TYPE_KERNEL;
    return CUDA_SUCCESS;
}

static CUresult child_graph(CUgraphNode node, CUgraph *graph) {
    CHECK(node == (CUgraphNode)2);
    *graph = (CUgraph)2;
    return CUDA_SUCCESS;
}

static CUresult kernel_node(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    parameters->func = FUNCTION(2);
    parameters->kernelParams = node == (CUgraphNode)1 ? of_node : of_child;
    return CUDA_SUCCESS;
}

static void play(void) {
    vgpu_driver_entries[ENTRY_cuFuncGetParamInfo] = (void *)function_info;
    vgpu_driver_entries[ENTRY_cuKernelGetParamInfo] = (void *)kernel_info;
    vgpu_driver_entries[ENTRY_cuGraphGetNodes] = (void *)get_nodes;
    vgpu_driver_entries[ENTRY_cuGraphNodeGetType] = (void *)node_type;
    vgpu_driver_entries[ENTRY_cuGraphChildGraphNodeGetGraph] = (void *)child_graph;
    vgpu_driver_entries[ENTRY_cuGraphKernelNodeGetParams] = (void *)kernel_node;
}

static uint32_t touches(uint32_t number) {
    vgpu_touched_tell(vgpu_passage);
    return entries[number > 5][records[number].entry].touches;
}

static void check_parameters_that_stand_apart(void) {
    uint64_t first = BASE(0) + 4096;
    uint32_t second = UINT32_MAX;
    struct {
        uint64_t words[3];
    } third = {{7, BASE(1), BASE(6) + VGPU_TIER_GRANULE - 1}};
    void *list[] = {&first, &second, &third};
    const uint64_t launches = cards[0].policy.now;
    asked = 0;
    for (int i = 0; i < 3; i++)
        vgpu_touched_kernel(FUNCTION(0), list, NULL);
    CHECK(asked == 4); /* once, and what comes behind the last one */
    CHECK(touches(0) == 3 && touches(1) == 3 && touches(6) == 3 && touches(2) == 0);
    CHECK(cards[0].policy.now == launches + 3 && cards[1].policy.now == 3);
    vgpu_touched_kernel(FUNCTION(1), list, NULL);
    CHECK(touches(0) == 3 && cards[0].policy.now == launches + 3); /* of what touches nothing nothing is told */
    vgpu_parameters_stale();
    vgpu_touched_kernel(FUNCTION(0), list, NULL);
    CHECK(touches(0) == 4 && asked == 9);
    vgpu_touched_kernel(FUNCTION(2), list, NULL); /* what one asks about functions does not know kernels */
    CHECK(touches(0) == 5 && touches(1) == 4);
}

static void check_parameters_in_a_buffer(void) {
    uint64_t buffer[] = {1, BASE(2), UINT64_MAX, BASE(4)};
    size_t size = 24;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    vgpu_touched_kernel(FUNCTION(0), NULL, extra);
    CHECK(touches(2) == 1 && touches(4) == 0);
    void *senseless[] = {(void *)9, buffer, CU_LAUNCH_PARAM_END};
    vgpu_touched_kernel(FUNCTION(0), NULL, senseless);
    vgpu_touched_kernel(FUNCTION(0), NULL, NULL);
    CHECK(touches(2) == 1);
}

/* Blocks that have gone in between, or cannot be told of: nothing that was noted reaches another one. */
static void check_blocks_that_go(void) {
    uint64_t buffer[] = {BASE(5)};
    size_t size = 8;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    vgpu_touched_kernel(FUNCTION(0), NULL, extra);
    records[5].bytes = 0;
    CHECK(touches(5) == 0);
    records[5].bytes = VGPU_TIER_GRANULE;
    locked_by_another = true;
    for (int i = 0; i < 1000; i++)
        vgpu_touched_kernel(FUNCTION(0), NULL, extra);
    locked_by_another = false;
    CHECK(touches(5) > 0 && touches(5) < 100); /* the rest was let go of */
}

static void check_graphs(void) {
    const uint32_t before = touches(3);
    vgpu_graph_touches_read((CUgraph)1, (CUgraphExec)77);
    vgpu_touched_graph((CUgraphExec)77);
    vgpu_touched_graph((CUgraphExec)78);
    CHECK(touches(3) == before + 1 && touches(7) == 1);
    leaf[4] = ~1u; /* another block has that address now */
    const uint32_t other = touches(1);
    vgpu_touched_graph((CUgraphExec)77);
    CHECK(touches(3) == before + 1 && touches(1) == other + 1 && touches(7) == 2);
    leaf[4] = ~3u;
    vgpu_graph_touches_gone((CUgraphExec)77);
    vgpu_touched_graph((CUgraphExec)77);
    CHECK(touches(3) == before + 1 && touches(7) == 2);
}

/* Of fast launches some are noted, at random, and about as many as there should be. */
static void check_samples(void) {
    uint64_t buffer[] = {BASE(4)};
    size_t size = 8;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    const uint64_t before = (touches(4), cards[0].policy.now);
    vgpu_passage->noted_of = 8;
    vgpu_passage->random = 5;
    for (int i = 0; i < 8000; i++)
        vgpu_touched_kernel(FUNCTION(0), NULL, extra);
    touches(4);
    CHECK(cards[0].policy.now - before > 900 && cards[0].policy.now - before < 1100);
}

int main(void) {
    make_blocks();
    play();
    CHECK(vgpu_passage_take());
    check_parameters_that_stand_apart();
    check_parameters_in_a_buffer();
    check_blocks_that_go();
    check_graphs();
    check_samples();
    return 0;
}
