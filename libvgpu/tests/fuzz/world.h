/* The region and the simulated cards that a program is played on, and the comparison of the two. */
#ifndef VGPU_FUZZ_WORLD_H
#define VGPU_FUZZ_WORLD_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "play.h"

/* Makes a folder with a region and cards, and names both in the environment; before the first CUDA call. */
void world_make(void);
/* Deletes the folder. */
void world_remove(void);
/* New limits and a fresh peak; nothing is in use. `choice` picks the limits. */
void world_begin(unsigned choice);
/* Compares ledger and truth of every card and process while nothing moves; `moment` for the message.
 * `slack`: bytes by which a driver may pass the limit for a moment, where it takes more from the card than it was asked
 * for. `graphs`: of this process on each card, what the ledger may hold beyond the truth (play_graphs_beyond); NULL:
 * nothing. */
void world_compare(const char *moment, uint64_t slack, const uint64_t *graphs);
/* Frees what the dead held; then nothing may be left. */
void world_compare_empty(const char *moment, uint64_t slack);
/* Set by a standalone driver: where answers are noted, and what is called with the text of a violation. Otherwise:
 * stderr and abort. */
extern uint8_t *world_features;
#define WORLD_FEATURES (1u << 18)
#endif
