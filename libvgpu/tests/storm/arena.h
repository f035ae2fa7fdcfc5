/* What the storms share: containers on simulated cards, and memory that their processes see together. */
#ifndef VGPU_STORM_ARENA_H
#define VGPU_STORM_ARENA_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu/agent.h"
#include "vgpu/simulator.h"

#define MIB (UINT64_C(1) << 20)

/* Ends the program with what went wrong. */
void arena_need(bool good, const char *what);
/* Makes the card that VGPU_SIMULATE names in VGPU_SIM_DIR, before any CUDA call. */
struct vgpu_sim_card arena_card(void);
/* What the card really holds now, and has at most held. */
struct vgpu_sim_card arena_truth(void);
/* A container with room for `bytes` and `contexts` contexts on the card, in FOLDER/container.NUMBER; processes that are
 * forked after arena_enter belong to it. The caller keeps the region. */
vgpu_region *arena_container(const char *folder, unsigned number, const struct vgpu_sim_card *card, unsigned contexts,
                             uint64_t bytes);
void arena_enter(const char *folder, unsigned number);
void *arena_shared(size_t size);
uint64_t arena_now_ns(void);
/* Whether LD_PRELOAD puts the library under this program; without it the same storm shows what the driver alone does.
 */
bool arena_limited(void);

/* A meeting of `count` processes, again and again. */
struct meeting {
    _Atomic uint32_t arrived;
};
void arena_meet(struct meeting *meeting, uint32_t count, uint32_t number);
#endif
