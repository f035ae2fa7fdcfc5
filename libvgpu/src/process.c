/* Connects all parts of a process; no other file knows them all. */
#include "ledger/process.h"

#include "gate/gate.h"
#include "gate/streams.h"
#include "hooks/context.h"
#include "hooks/endpoints.h"
#include "hooks/sparse.h"
#include "hooks/vmm.h"
#include "ledger/sizes.h"
#include "pacer/graph_cards.h"
#include "pacer/inspect.h"
#include "pacer/owed.h"
#include "pacer/pacer.h"
#include "pacer/samples.h"
#include "pacer/settle.h"
#include "reserves/capture.h"
#include "reserves/graphs.h"
#include "reserves/pools.h"
#include "tier/blocks.h"
#include "tier/graph_touches.h"
#include "tier/memory.h"
#include "tier/move.h"
#include "tier/parameters.h"
#include "tier/tier.h"
#include "tier/watch.h"

void (*const vgpu_forgetters[])(void) = {
    vgpu_sizes_forget,
    vgpu_pools_forget,
    vgpu_graphs_forget,
    vgpu_captures_forget,
    vgpu_primaries_forget,
    vgpu_context_limits_forget,
    vgpu_blocks_forget,
    vgpu_sparse_forget,
    vgpu_endpoints_forget,
    vgpu_samples_forget,
    vgpu_owed_forget,
    vgpu_inspect_forget,
    vgpu_pacer_forget,
    vgpu_settle_forget,
    vgpu_tier_blocks_forget,
    vgpu_tier_free_forget,
    vgpu_tier_peers_forget,
    vgpu_gate_forget,
    vgpu_streams_forget,
    vgpu_parameters_forget,
    vgpu_moves_forget,
    vgpu_graph_touches_forget,
    vgpu_graph_cards_forget,
    vgpu_watch_forget,
    NULL,
};

static bool blocks_give_back(unsigned card) {
    (void)card; /* for every card */
    return vgpu_blocks_give_back();
}

static bool tier_collect(unsigned card) {
    (void)card;
    return vgpu_tier_collect();
}

bool (*const vgpu_reclaimers[])(unsigned card) = {blocks_give_back, vgpu_pools_give_back, tier_collect, NULL};

static bool any_capture(void) {
    return vgpu_any_capture();
}

static void pool_forget(void *pool, uint64_t bytes) {
    vgpu_pool_forget(pool, bytes);
}

const struct vgpu_above vgpu_above = {
    .any_capture = any_capture,
    .pool_forget = pool_forget,
    .with_room = vgpu_with_room,
    .context_seen = vgpu_context_seen,
};
