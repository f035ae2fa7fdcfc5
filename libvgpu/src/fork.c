#include "fork.h"

void vgpu_forget_parent(void) {
    vgpu_sizes_forget();
    vgpu_pools_forget();
    vgpu_graphs_forget();
    vgpu_captures_forget();
    vgpu_primaries_forget();
    vgpu_context_limits_forget();
    vgpu_blocks_forget();
    vgpu_sparse_forget();
    vgpu_endpoints_forget();
    vgpu_samples_forget();
    vgpu_owed_forget();
    vgpu_inspect_forget();
    vgpu_pacer_forget();
    vgpu_tier_blocks_forget();
    vgpu_tier_free_forget();
    vgpu_tier_peers_forget();
    vgpu_gate_forget();
    vgpu_streams_forget();
    vgpu_parameters_forget();
    vgpu_moves_forget();
    vgpu_graph_touches_forget();
    vgpu_graph_cards_forget();
    vgpu_watch_forget();
}
