/* Plays a random program: operations of four bytes, spread over the threads of this process and over helper processes.
 */
#ifndef VGPU_FUZZ_PLAY_H
#define VGPU_FUZZ_PLAY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DEVICES 3 /* simulated cards; the limits list all but the last */
#define LIMITED 2
#define LANES 4
#define MAX_OPERATIONS 160
#define MIB (UINT64_C(1) << 20)

struct operation {
    uint8_t code; /* low 6 bits: what; high 2 bits: on which lane */
    uint8_t a, b, c;
};

/* Bytes of an allocation are chosen around these: the limit of each listed card and what is left of it now. */
uint64_t world_limit(unsigned card);
uint64_t world_left(unsigned card);
/* Changes the limit of a card while the program runs. */
void world_set_limit(unsigned card, uint64_t bytes);
/* Something happened that must never happen. */
void world_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* An operation, which one its code means, and its answer, for whoever looks for inputs that do something new. */
void world_feature(const struct operation *operation, unsigned meaning, unsigned result);

/* Once, before helpers are made: memory by which they tell each other what they export. */
void shared_prepare(void);
/* Whether some process imported what another has made, by a shareable handle: both are charged for it, and the card
 * holds it once. */
bool imports_crossed(void);
/* Before helpers play: no handle is posted, nothing was imported. */
void shared_begin(void);
/* Forgets every handle of an earlier program. `concurrent`: several threads will play; `graphs`: some codes mean
 * operations on graphs. */
void play_begin(bool concurrent, bool graphs);
/* The operations of one lane, in this thread. */
void play(const struct operation *operations, size_t count, unsigned lane);
/* Ends the captures that this thread alone may end: its last act. */
void play_leave(void);
/* Whether the program has used memory pools: they take memory from the card in pieces of up to 32 MiB. */
bool play_used_pools(void);
/* Lets the library look at every pool once more: a driver may shrink a pool without being asked. */
void play_settle(void);
/* Bytes that the ledger may hold for graphs of this process on a card beyond what the driver has reserved for them,
 * while none is launched: a launch ends by a charge equal to the reserve, so no more than the driver has given back
 * since without a call of the program. */
uint64_t play_graphs_beyond(unsigned card);
/* Lets the driver give back what graphs do not use; then the two are equal. */
void play_trim_graphs(void);
/* Ends everything that this process has made, by legal calls alone. */
void play_clean(void);
#endif
