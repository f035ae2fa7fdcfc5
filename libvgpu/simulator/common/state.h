/* What the simulator's processes share: a state file with the cards, and one file per process with its truth.
 *
 * DIR/state               struct sim_state: cards, how far their time is, the registry of processes
 * DIR/nvidia-simulated.N  struct sim_process: what process N holds, ran and has to run; an open-file-description lock
 * on it, held by the process and inherited by its forks, is what makes it alive: its memory goes when the last
 * descriptor closes, as with the driver
 *
 * Nothing here sleeps in a lock: every lock is a word that names its holder, so that whoever finds a dead holder takes
 * it over (lock.c).
 */
#ifndef VGPU_SIMULATOR_STATE_H
#define VGPU_SIMULATOR_STATE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/simulator.h"

#define SIM_MAGIC 0x6d69737570677631ull
#define SIM_ABI 7u
#define SIM_CARDS VGPU_SIM_MAX_CARDS
#define SIM_SLOTS 1024u
#define SIM_HISTORY 128u    /* dead processes that stay readable before their slots are used again */
#define SIM_IN_FLIGHT 1024u /* launches of one process that one card can hold; then the launch call waits */
#define SIM_RING 2048u      /* launches of one process on one card that stay readable; at least twice SIM_IN_FLIGHT */
/* of one process: those that may start are among so many, counted from the first that has not ended */
#define SIM_WINDOW 64u
#define SIM_WHOLE 1000u          /* width of a kernel that fills its card */
#define SIM_TICK_NS 166666667ull /* utilisation is sampled six times a second */
#define SIM_TICKS 16u            /* samples that are kept */
#define SIM_NEVER UINT64_MAX
#define SIM_INSTANCES 7u /* of one MIG board */
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
    bool unified;                         /* no memory of its own */
    uint64_t event_ns;                    /* that an event with a time takes on the card */
    bool fills_take_sms, copies_take_sms; /* see struct sim_timing */
    uint64_t memory_speed, bus_speed;     /* bytes per microsecond; no bus_speed: host memory is the card's own */
    const char *mig; /* cards are MIG instances of this shape, all of one board, the profile `board` */
    uint32_t board;
};

/* Busy time before the first work in a sample period, by the period's number. */
struct sim_usage {
    _Atomic uint64_t tick[SIM_TICKS], busy_ns[SIM_TICKS];
};

enum sim_phase { SIM_QUEUED, SIM_RUNNING, SIM_FINISHED };

/* Copies to the card, from it and within it; each engine makes one at a time. */
enum sim_engine_kind { SIM_TO_CARD, SIM_FROM_CARD, SIM_WITHIN_CARD, SIM_ENGINES };

/* One launch, or an event that takes time on the card. `due` is the progress of its process at which it ends: all
 * kernels that a process runs at one time go on together or, while another process has the card, not at all. Where
 * kernels run one by one it is known from the start. Progress is busy time, and that of events, which are no kernels.
 */
struct sim_launch {
    uint64_t not_before, duration;
    uint64_t after, prefix; /* begins when the launch `after` and all up to `prefix` have ended */
    uint32_t group;         /* 1 and more: it meets others */
    uint64_t meeting;       /* the number of it */
    uint32_t width;         /* share of the card that it fills, of SIM_WHOLE; 0: an event */
    _Atomic uint32_t phase;
    _Atomic uint64_t due, end;
    uint64_t reserved;
};

/* What changes together when a card's time goes on, written before it is done: whoever finds it half done does it again
 * (slices.c). */
struct sim_step {
    _Atomic uint64_t written, applied; /* numbers */
    uint32_t slot, generation;         /* of the process that it is about */
    uint64_t clock_ns, card_busy_ns, current, slice_start_ns, switches, busy_ns, progress_ns, waited_ns;
    uint64_t finished; /* the launch that ended; 0: none */
};

struct sim_card {
    char uuid[48];
    _Atomic uint32_t xid, xid_count;
    sim_lock memory_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t used, peak;
    sim_lock time_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t clock_ns, busy_ns; /* all is decided up to clock_ns */
    _Atomic uint64_t current;           /* whose turn it is: generation << 32 | slot + 1; 0: nobody's yet */
    _Atomic uint64_t slice_start_ns, switches;
    _Atomic uint64_t active[SIM_SLOTS / 64]; /* a bit for each slot that may have work */
    struct sim_step step;
    struct sim_usage usage;
    struct sim_engine {
        /* when the last copy given to it ends, and whose that is: generation << 32 | slot + 1 */
        _Atomic uint64_t free_ns, owner;
    } engines[SIM_ENGINES];
};

/* Slots are claimed, never freed: `owner` is generation << 2 | state. */
enum sim_slot_state { SIM_UNUSED, SIM_LIVE, SIM_DEAD };
struct sim_slot {
    _Atomic uint64_t owner;
    _Atomic uint64_t seen_ns;
    uint64_t order; /* of registration: the oldest dead one is used again first */
} __attribute__((aligned(SIM_LINE)));

/* Kernels of one name that meet: the nth on each card spins until the nth has started on as many cards as they say. All
 * by the number of a meeting; a card cannot begin the next one before all have come, so that two meetings at most are
 * under way. */
#define SIM_GROUPS 16u
#define SIM_MEETINGS 4u
struct sim_group {
    _Atomic uint64_t key; /* 0: none */
    uint32_t size;
    struct {
        _Atomic uint64_t issued, started, start_ns[SIM_MEETINGS];
    } cards[SIM_CARDS];
};

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
    _Atomic uint64_t slice_ns, switch_ns;
    _Atomic uint32_t groups_used;
    _Atomic uint64_t joint_ns; /* since there are groups all cards' time goes on together, and is decided up to here */
    struct sim_group groups[SIM_GROUPS];
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
    uint32_t kernels; /* that it may run side by side */
    struct sim_share_of_card {
        _Atomic uint64_t used, peak, busy_ns, progress_ns, launches;
        _Atomic uint64_t issued, completed; /* launches and events; all up to `completed` have ended */
        /* time with work but without the card, up to the last turn; when that turn ended */
        _Atomic uint64_t waited_ns, left_ns;
        _Atomic uint32_t contexts;
        struct sim_usage usage;
        _Atomic uint64_t host, host_peak; /* host memory that is there for this card */
        _Atomic uint64_t faults;          /* launches whose memory was not there, or was taken away under them */
        /* of managed memory that comes and goes: bytes on the card, those that others have taken although this process
         * believes them to be there, and when the oldest group was touched; the first two under the card's memory lock
         */
        _Atomic uint64_t managed, taken, oldest_ns;
    } cards[SIM_CARDS] __attribute__((aligned(SIM_LINE)));
    struct sim_launch launched[SIM_CARDS][SIM_RING] __attribute__((aligned(SIM_LINE)));
};

/* How long things take; common/timing.c. */
struct sim_timing {
    uint64_t launch_ns;           /* from a launch or a record to its begin on an idle card */
    uint64_t record_ns, query_ns; /* that recording and querying an event take at least */
    uint64_t event_ns;            /* that an event with a time takes on the card */
    uint64_t load_ns;             /* of loading a function's code, on the host */
    /* a launch returns when no more of its process's work than this is left on the card; SIM_NEVER: at once */
    uint64_t queued_ns;
    uint64_t remap_ns; /* of unmapping, mapping and setting access, together */
    /* bytes per microsecond; of one group of managed memory that is not on the card, besides its bytes */
    uint64_t bus, fault_ns;
    bool load_on_get;                     /* when the function is asked for, not at its first use */
    uint64_t memory;                      /* bytes per microsecond that the card's memory reads or writes */
    bool fills_take_sms, copies_take_sms; /* fills, and copies within a card, run as kernels do; else on an engine */
    bool fills, within;                   /* whether they take time */
    /* whether copies and memory behind the bus take time; whether managed memory comes and goes */
    bool copies, migrate;
    uint32_t kernels;
};

/* One opened state directory. `self` is NULL in a process that only looks. */
struct sim {
    struct sim_state *state;
    const struct sim_profile *profile;
    struct sim_timing timing;
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
/* Opens the directory that the environment names, making it if VGPU_SIMULATE asks for it. 0, -ENOENT: none, -EEXIST:
 * made for another spec. */
int sim_open_environment(struct sim *sim);

/* Fills the cards that NVIDIA_VISIBLE_DEVICES leaves to this process, as the container runtime would; -1: void, no
 * driver at all. */
int sim_container_cards(const struct sim *sim, int cards[SIM_CARDS]);
/* PCI address of a card, "00000000:53:00.0" with `domain_digits` 8 or 4. */
void sim_pci_address(const struct sim *sim, int card, unsigned *domain, unsigned *bus);

/* Makes this process one that holds memory and runs kernels; 0 or a negative errno. */
int sim_register(struct sim *sim);
/* Whether the lock of a slot's process is held; the slot is marked dead when it is not. */
bool sim_alive(struct sim *sim, uint32_t slot);
bool sim_self_valid(const struct sim *sim);
struct sim_process *sim_peer(struct sim *sim, uint32_t slot);
/* In clock ticks since boot, of a name below /proc: a pid or "self"; 0: unknown. */
uint64_t sim_start_time(const char *name);

/* Returns true when a dead holder was replaced: the caller then repairs what the lock guards. */
bool sim_acquire(struct sim *sim, sim_lock *lock);
void sim_release(sim_lock *lock);

/* 0, -ENOMEM: the card is full, -EIO: this process lost its place. */
int sim_charge(struct sim *sim, int card, uint64_t bytes);
void sim_uncharge(struct sim *sim, int card, uint64_t bytes);
/* Managed memory on the card that comes and goes. What a process believes to be there is `managed` + `taken`. */
/* Charged bytes are managed memory, no host memory any more. */
void sim_managed_came(struct sim *sim, int card, uint64_t bytes);
/* Managed memory goes from the card; `lost`: of it, first what others have taken. */
void sim_managed_go(struct sim *sim, int card, uint64_t bytes, bool lost);
/* Takes up to so much from the process whose managed memory was touched longest ago, and before `before_ns`; returns
 * how much. */
uint64_t sim_managed_take(struct sim *sim, int card, uint64_t bytes, uint64_t before_ns);

/* common/host.c: host memory of the driver, which has no limit here. It is counted by process and by the card that it
 * is there for. */
void sim_host_add(struct sim *sim, int card, uint64_t bytes);
void sim_host_note(struct sim_share_of_card *share, uint64_t bytes); /* the same, of any process */
void sim_host_sub(struct sim *sim, int card, uint64_t bytes);
/* As sim_transfer. */
bool sim_host_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes);
/* Of live processes. */
uint64_t sim_host(struct sim *sim, int card);
/* The machine's NUMA nodes, and the one that a card is next to: the two halves of the cards lie at one each. */
int sim_nodes(const struct sim *sim);
int sim_node_of(const struct sim *sim, int card);

/* Moves bytes that this process pays for to another one; false: that one is gone. */
bool sim_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes);
/* Bytes in use by live processes, counted anew. */
uint64_t sim_used(struct sim *sim, int card);

/* The code that this call of an entry point must answer; 0: none. Only worth a call while faults are armed. */
int sim_fault(struct sim *sim, const char *entry);
static inline bool sim_faults_armed(const struct sim *sim) {
    return __builtin_expect(sim->state && atomic_load_explicit(&sim->state->faults_armed, memory_order_relaxed) > 0, 0);
}

/* A place in the work of this process on a card: behind one launch and behind all up to another one; 0: none. */
struct sim_mark {
    uint64_t launch, prefix;
};
/* Gives a launch to the card; waits while this process has SIM_IN_FLIGHT there. Returns its sequence, from 1; 0: this
 * process lost its place. `width`: of SIM_WHOLE; 0: an event. */
uint64_t sim_launch(struct sim *sim, int card, uint64_t duration, uint32_t width, uint64_t not_before,
                    struct sim_mark after, uint32_t group);
/* The group of kernels with this key that meet on so many cards, from 1; 0: there is no room for another one. */
uint32_t sim_group(struct sim *sim, uint64_t key, uint32_t size);
/* This process lives now: should it die, its work goes on until then. */
void sim_seen(struct sim *sim);
/* Where launches return late, waits until little enough is queued. */
void sim_wait_queued(struct sim *sim, int card);
/* Gives a copy that may begin at `begin` to an engine of the card; returns when it ends. */
uint64_t sim_engine(struct sim *sim, int card, enum sim_engine_kind engine, uint64_t begin, uint64_t duration);
/* Moves the card's time to now; cheap when it has nothing to do. */
void sim_advance(struct sim *sim, int card);
/* Takes the card's time lock, moves its time to now, and returns that. */
uint64_t sim_time_begin(struct sim *sim, int card);
/* Under the card's time lock. */
void sim_advance_locked(struct sim *sim, int card, uint64_t now);
/* Under the card's time lock, after advancing: no launch of this process ends before that; *shared: it can also become
 * earlier, as others are ahead. */
uint64_t sim_predict(struct sim *sim, int card, struct sim_mark mark, bool *shared);
bool sim_reached(struct sim *sim, int card, struct sim_mark mark);
/* Whether all up to the sequence have ended. */
bool sim_finished(struct sim *sim, int card, uint64_t sequence);
/* When a place was reached, once it was; 0 for nothing. */
uint64_t sim_reached_at(struct sim *sim, int card, struct sim_mark mark);
/* Sleeps until a place is reached. */
void sim_wait_mark(struct sim *sim, int card, struct sim_mark mark);
/* The same for all up to the sequence; 0 waits for nothing. */
void sim_wait(struct sim *sim, int card, uint64_t sequence);
void sim_sleep_until(uint64_t deadline);
/* When a place will be reached if nothing changes. */
uint64_t sim_expected_end(struct sim *sim, int card, struct sim_mark mark);
/* Time up to `now` for which a process has work but not the card. */
uint64_t sim_waited(struct sim *sim, int card, uint32_t slot, uint64_t now);

/* common/usage.c */
void sim_usage_note(struct sim_usage *usage, uint64_t now, uint64_t busy);
/* Share of the last second in which the card (slot < 0) or one process ran kernels, in parts per million, up to the
 * last sample; a caller that has seen the samples up to `seen_ns` (CLOCK_MONOTONIC; 0: none) gets the newer ones only.
 * *sampled_ns: when the last one was taken; *some: whether there is a newer one, and the process ran. */
uint32_t sim_share(struct sim *sim, int card, int slot, uint64_t seen_ns, uint64_t *sampled_ns, bool *some);

/* common/timing.c */
#define SIM_SLICE_NS 2000000ull
#define SIM_SWITCH_NS 10000ull
/* Reads VGPU_SIM_TIME; what concerns the cards goes into the state. -EINVAL, with a message, when it is not what is
 * allowed. */
int sim_timing_read(struct sim *sim);
#endif
