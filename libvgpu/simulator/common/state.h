/* What the simulator's processes share: a state file with the cards, and one file per process with its truth.
 *
 * DIR/state        struct sim_state: cards, their time lines, the registry of processes
 * DIR/process.N    struct sim_process: what process N holds and ran; an open-file-description lock on it, held by the process and inherited by
 *                  its forks, is what makes it alive: its memory goes when the last descriptor closes, as with the driver
 *
 * Nothing here sleeps in a lock: every lock is a word that names its holder, so that whoever finds a dead holder takes it over (lock.c).
 */
#ifndef VGPU_SIMULATOR_STATE_H
#define VGPU_SIMULATOR_STATE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/simulator.h"

#define SIM_MAGIC 0x6d69737570677631ull
#define SIM_ABI 2u
#define SIM_CARDS VGPU_SIM_MAX_CARDS
#define SIM_SLOTS 1024u
#define SIM_HISTORY 128u    /* dead processes that stay readable before their slots are used again */
#define SIM_QUEUE 16384u    /* launches of all processes that one card can hold */
#define SIM_IN_FLIGHT 1024u /* launches of one process that one card can hold; then the launch call waits */
#define SIM_ENDS 2048u      /* completion times that stay readable; at least twice SIM_IN_FLIGHT */
#define SIM_INSTANCES 7u    /* of one MIG board */
#define SIM_LINE 64
#define SIM_TEARDOWN_NS 1000000ull /* a death is noticed at the latest this long after it matters */

typedef _Atomic uint64_t sim_lock; /* 0: free, else slot + 1, thread and a count that differs for every acquisition */

struct sim_driver {
    const char *id, *version; /* "12.4" and the driver's own number */
    int cuda;                 /* 1000 * major + 10 * minor */
};

struct sim_profile {
    const char *id, *name, *vbios, *part_number;
    uint64_t total, reserved; /* NVML's view of the board memory; CUDA can use total - reserved */
    uint64_t context_bytes, module_bytes;
    int brand, architecture;
    int major, minor, multiprocessors, cores;
    int clock_mhz, idle_clock_mhz, memory_clock_mhz, video_clock_mhz, bus_width, l2_bytes;
    int shared_per_block_optin, shared_per_multiprocessor, threads_per_multiprocessor, blocks_per_multiprocessor;
    uint32_t pci_device, pci_subsystem, first_bus, bus_step;
    uint32_t power_mw, idle_power_mw, min_power_mw;
    int temperature, slowdown_temperature, shutdown_temperature;
    int pcie_generation, pcie_width, nvlinks, nvlink_generation;
    uint64_t bar1;
    bool mig_capable;
    bool unified; /* no memory of its own */
    const char *mig; /* cards are MIG instances of this shape, all of one board, the profile `board` */
    uint32_t board;
};

enum sim_phase { SIM_QUEUED, SIM_RUNNING, SIM_FINISHED };

/* One launch on a card's time line. Fields below phase are written by whoever advances the card, before phase says that they are valid. */
struct sim_launch {
    uint64_t not_before, duration, cumulative; /* cumulative: durations of all launches up to and including this one */
    uint64_t sequence;                         /* per process and card, from 1 */
    uint32_t slot, generation;
    _Atomic uint32_t phase;
    uint32_t reserved;
    uint64_t start, end, card_busy, process_busy;
};

struct sim_card {
    char uuid[48];
    _Atomic uint32_t xid, xid_count;
    sim_lock memory_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t used, peak, recounted_ns;
    sim_lock time_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t head, tail, clock_ns, busy_ns, cumulative;
    struct sim_launch queue[SIM_QUEUE] __attribute__((aligned(SIM_LINE)));
};

/* Slots are claimed, never freed: `owner` is generation << 2 | state. */
enum sim_slot_state { SIM_UNUSED, SIM_LIVE, SIM_DEAD };
struct sim_slot {
    _Atomic uint64_t owner;
    _Atomic uint64_t seen_ns;
    uint64_t order; /* of registration: the oldest dead one is used again first */
} __attribute__((aligned(SIM_LINE)));

#define SIM_FAULTS 32
struct sim_fault {
    char entry[56];
    int32_t code;
    _Atomic int64_t remaining; /* calls up to and including the one that fails; 0: nothing armed */
};

struct sim_state {
    uint64_t magic;
    uint32_t abi, size;
    char boot_id[40], spec[64], board_uuid[48]; /* board_uuid: of MIG instances */
    uint32_t profile, card_count;
    sim_lock registry_lock;
    uint64_t registrations;
    _Atomic uint32_t slots_used;
    _Atomic int32_t faults_armed;
    struct sim_fault faults[SIM_FAULTS];
    struct sim_slot slots[SIM_SLOTS];
    struct sim_card cards[SIM_CARDS] __attribute__((aligned(4096)));
};

struct sim_process {
    _Atomic uint32_t generation;
    int32_t pid;
    uint64_t start_time, pid_namespace;
    char name[256];
    struct {
        _Atomic uint64_t used, peak, busy_ns, launches;
        _Atomic uint64_t issued, completed; /* sequences */
        _Atomic uint32_t contexts;
    } cards[SIM_CARDS] __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t ends[SIM_CARDS][SIM_ENDS]; /* completion time of a sequence, modulo SIM_ENDS */
};

/* One opened state directory. `self` is NULL in a process that only looks. */
struct sim {
    struct sim_state *state;
    const struct sim_profile *profile;
    struct sim_process *self, *peers[SIM_SLOTS];
    uint32_t slot, generation;
    int lock_fd;
    char dir[200];
};

const struct sim_profile *sim_profile_at(uint32_t index);
const struct sim_driver *sim_driver_named(const char *id);
/* Of PROFILE[xN][@DRIVER]; NULL: unknown. */
const struct sim_driver *sim_driver_of_spec(const char *spec);
/* The driver that this process sees: VGPU_SIM_DRIVER, else that of the spec, else the newest. */
const struct sim_driver *sim_driver(void);
/* Parses PROFILE[xN][@DRIVER]; returns the profile's index or -1. */
int sim_spec_parse(const char *spec, uint32_t *cards);
uint64_t sim_usable(const struct sim_profile *profile);

uint64_t sim_now(void);
uint64_t sim_wall_us(void);
/* Default directory rules of vgpu/simulator.h; returns 0 or -ENAMETOOLONG. */
int sim_directory(char *out, unsigned long size);
int sim_open(struct sim *sim, const char *dir);
void sim_close(struct sim *sim);
/* Opens the directory that the environment names, making it if VGPU_SIMULATE asks for it. 0, -ENOENT: none, -EEXIST: made for another spec. */
int sim_open_environment(struct sim *sim);

/* Fills the cards that NVIDIA_VISIBLE_DEVICES leaves to this process, as the container runtime would; -1: void, no driver at all. */
int sim_container_cards(const struct sim *sim, int cards[SIM_CARDS]);
/* PCI address of a card, "00000000:53:00.0" with `domain_digits` 8 or 4. */
void sim_pci_address(const struct sim *sim, int card, unsigned *domain, unsigned *bus);

/* Makes this process one that holds memory and runs kernels; 0 or a negative errno. */
int sim_register(struct sim *sim);
/* Whether the lock of a slot's process is held; the slot is marked dead when it is not. */
bool sim_alive(struct sim *sim, uint32_t slot);
bool sim_self_valid(const struct sim *sim);
struct sim_process *sim_peer(struct sim *sim, uint32_t slot);
uint64_t sim_start_time(int pid);

/* Returns true when a dead holder was replaced: the caller then repairs what the lock guards. */
bool sim_acquire(struct sim *sim, sim_lock *lock);
void sim_release(sim_lock *lock);

/* 0, -ENOMEM: the card is full, -EIO: this process lost its place. */
int sim_charge(struct sim *sim, int card, uint64_t bytes);
void sim_uncharge(struct sim *sim, int card, uint64_t bytes);
/* Moves bytes that this process pays for to another one; false: that one is gone. */
bool sim_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes);
/* Bytes in use by live processes, counted anew. */
uint64_t sim_used(struct sim *sim, int card);

/* The code that this call of an entry point must answer; 0: none. Only worth a call while faults are armed. */
int sim_fault(struct sim *sim, const char *entry);
static inline bool sim_faults_armed(const struct sim *sim)
{
    return __builtin_expect(sim->state && atomic_load_explicit(&sim->state->faults_armed, memory_order_relaxed) > 0, 0);
}

/* Puts a launch on the card's time line; waits while this process has SIM_IN_FLIGHT there. Returns its sequence. */
uint64_t sim_launch(struct sim *sim, int card, uint64_t duration, uint64_t not_before);
/* Moves the card's time line to now; cheap when nothing ended. */
void sim_advance(struct sim *sim, int card);
bool sim_finished(struct sim *sim, int card, uint64_t sequence);
/* Sleeps until the sequence has ended, then returns the time it ended at; 0 for sequence 0. */
uint64_t sim_wait(struct sim *sim, int card, uint64_t sequence);
void sim_sleep_until(uint64_t deadline);
/* When a sequence will end if nothing changes: exact once it runs. */
uint64_t sim_expected_end(struct sim *sim, int card, uint64_t sequence);
/* Share of the last second in which the card (slot < 0) or one process ran kernels, in parts per million; recent: a launch lies in it. */
uint32_t sim_share(struct sim *sim, int card, int slot, bool *recent);
#endif
