/* What a forked child must not inherit: the driver does not survive a fork, so the parent's blocks, pools and measurements are not the child's,
 * and a lock that another thread held at that moment would never be released. */
#ifndef VGPU_FORK_H
#define VGPU_FORK_H

/* Empties all of them. Called by a child when it first asks how it is limited, which it notices by its emptied struct vgpu_local. */
void vgpu_forget_parent(void);

/* One per module that keeps such things. */
void vgpu_sizes_forget(void);
void vgpu_pools_forget(void);
void vgpu_graphs_forget(void);
void vgpu_captures_forget(void);
void vgpu_primaries_forget(void);
void vgpu_context_limits_forget(void);
void vgpu_blocks_forget(void);
void vgpu_sparse_forget(void);
void vgpu_endpoints_forget(void);
void vgpu_samples_forget(void);
void vgpu_owed_forget(void);
void vgpu_inspect_forget(void);
void vgpu_pacer_forget(void);
void vgpu_tier_blocks_forget(void);
void vgpu_tier_free_forget(void);
void vgpu_tier_peers_forget(void);
void vgpu_gate_forget(void);
void vgpu_streams_forget(void);
void vgpu_parameters_forget(void);
void vgpu_moves_forget(void);
void vgpu_graph_touches_forget(void);
void vgpu_graph_cards_forget(void);
void vgpu_watch_forget(void);
#endif
