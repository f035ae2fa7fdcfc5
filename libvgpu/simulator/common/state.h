/* What the simulator's processes share: a state file with the cards, and one file per process with its truth.
 *
 * DIR/state               struct sim_state: cards, how far their time is, the registry of processes
 *
 * DIR/nvidia-simulated.N  struct sim_process: what process N holds, ran and has to run
 *
 * The process holds an open-file-description lock on its file, and its forks inherit the lock. While the lock is held,
 * the process counts as alive: its memory is freed when the last descriptor closes, as with the driver.
 *
 * No process sleeps while it holds a lock. Every lock is a word that names its holder, so that a process that finds a
 * dead holder can take the lock over (lock.c). */
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
#define SIM_HISTORY 128u    /* dead processes that stay readable before their slots are reused */
#define SIM_IN_FLIGHT 1024u /* launches of one process that one card can hold; a further launch call waits */
#define SIM_RING 2048u      /* launches of one process on one card that stay readable; at least twice SIM_IN_FLIGHT */
/* of one process: running and starting launches are among this many, counted from the first unfinished launch */
#define SIM_WINDOW 64u
#define SIM_WHOLE 1000u          /* width of a kernel that fills its card */
#define SIM_TICK_NS 166666667ull /* utilisation is sampled six times a second */
#define SIM_TICKS 16u            /* number of kept samples */
#define SIM_NEVER UINT64_MAX
#define SIM_INSTANCES 7u /* per MIG board */
#define SIM_LINE 64
#define SIM_TEARDOWN_NS 1000000ull /* a death is noticed no later than this after it matters */

typedef _Atomic uint64_t sim_lock; /* 0: free, else slot + 1, thread and a count that differs for every acquisition */

struct sim_driver {
    const char *id, *version; /* "12.4" and the version of the driver itself */
    int cuda;                 /* 1000 * major + 10 * minor */
};

struct sim_profile {
    const char *id, *name, *vbios, *part_number;
    uint64_t total, reserved; /* NVML's view of the board's memory; CUDA can use total - reserved */
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
    bool unified;                         /* the board has no memory of its own */
    uint64_t event_ns;                    /* time that a timed event takes on the card */
    bool fills_take_sms, copies_take_sms; /* see struct sim_timing */
    /* bytes per microsecond; no bus_speed: host memory is the card's own memory */
    uint64_t memory_speed, bus_speed;
    const char *mig; /* the cards are MIG instances of this shape, on one board of profile `board` */
    uint32_t board;
};

/* Busy time before the first work in a sample period, indexed by the period's number. */
struct sim_usage {
    _Atomic uint64_t tick[SIM_TICKS], busy_ns[SIM_TICKS];
};

enum sim_phase { SIM_QUEUED, SIM_RUNNING, SIM_FINISHED };

/* Copies to the card, from it, and within it; each engine makes one copy at a time. */
enum sim_engine_kind { SIM_TO_CARD, SIM_FROM_CARD, SIM_WITHIN_CARD, SIM_ENGINES };

/* One launch, or an event that takes time on the card. `due` is the progress of its process at which it ends. All
 * kernels that a process runs at one time advance together, or not at all while another process has the card. If
 * kernels run one by one, `due` is known from the start. Progress is busy time plus the time of events, which are no
 * kernels. */
struct sim_launch {
    uint64_t not_before, duration;
    uint64_t after, prefix; /* starts when the launch `after` and all launches up to `prefix` have ended */
    uint32_t group;         /* 1 and more: the kernel meets others */
    uint64_t meeting;       /* number of the meeting */
    uint32_t width;         /* the share of the card that the launch fills, in 1/SIM_WHOLE; 0: an event */
    _Atomic uint32_t phase;
    _Atomic uint64_t due, end;
    uint64_t reserved;
};

/* The changes of one step of a card's time. They are written before they are applied, so that a process that finds a
 * half-applied step can apply it again (slices.c). */
struct sim_step {
    _Atomic uint64_t written, applied; /* step numbers */
    uint32_t slot, generation;         /* of the step's process */
    uint64_t clock_ns, card_busy_ns, current, slice_start_ns, switches, busy_ns, progress_ns, waited_ns;
    uint64_t finished; /* the launch that ended; 0: none */
};

struct sim_card {
    char uuid[48];
    _Atomic uint32_t xid, xid_count;
    sim_lock memory_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t used, peak;
    sim_lock time_lock __attribute__((aligned(SIM_LINE)));
    _Atomic uint64_t clock_ns, busy_ns; /* everything is decided up to clock_ns */
    _Atomic uint64_t current;           /* the process that has its turn: generation << 32 | slot + 1; 0: none yet */
    _Atomic uint64_t slice_start_ns, switches;
    _Atomic uint64_t active[SIM_SLOTS / 64]; /* a bit for each slot that may have work */
    struct sim_step step;
    struct sim_usage usage;
    struct sim_engine {
        /* when the last copy given to the engine ends, and its process: generation << 32 | slot + 1 */
        _Atomic uint64_t free_ns, owner;
    } engines[SIM_ENGINES];
};

/* Slots are claimed, never freed: `owner` is generation << 2 | state. */
enum sim_slot_state { SIM_UNUSED, SIM_LIVE, SIM_DEAD };
struct sim_slot {
    _Atomic uint64_t owner;
    _Atomic uint64_t seen_ns;
    uint64_t order; /* order of registration: the oldest dead slot is reused first */
} __attribute__((aligned(SIM_LINE)));

/* Kernels of one name that meet: the nth kernel on each card spins until the nth has started on `size` cards.
 * Everything is indexed by the number of the meeting. A card cannot begin the next meeting before all have come, so at
 * most two meetings are under way. */
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
    _Atomic int64_t remaining; /* calls up to and including the failing one; 0: no error is armed */
};

struct sim_state {
    uint64_t magic;
    uint32_t abi, size;
    char boot_id[40], spec[64], board_uuid[48]; /* board_uuid: for MIG instances */
    uint32_t profile, card_count;
    _Atomic uint64_t slice_ns, switch_ns;
    _Atomic uint32_t groups_used;
    /* if there are groups, the time of all cards advances together and is decided up to this time */
    _Atomic uint64_t joint_ns;
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
    uint32_t kernels; /* number of kernels that may run side by side */
    struct sim_share_of_card {
        _Atomic uint64_t used, peak, busy_ns, progress_ns, launches;
        _Atomic uint64_t issued, completed; /* launches and events; all up to `completed` have ended */
        /* time with work but without the card, up to the last turn; end of that turn */
        _Atomic uint64_t waited_ns, left_ns;
        _Atomic uint32_t contexts;
        struct sim_usage usage;
        _Atomic uint64_t host, host_peak; /* host memory made for this card */
        _Atomic uint64_t faults;          /* launches whose memory was missing, or was unmapped while they ran */
        /* Managed memory that comes and goes. `managed`: bytes on the card. `taken`: bytes that other processes have
         * taken while this process still believes them to be on the card. `oldest_ns`: when the oldest group was
         * touched. The card's memory lock protects the first two. */
        _Atomic uint64_t managed, taken, oldest_ns;
    } cards[SIM_CARDS] __attribute__((aligned(SIM_LINE)));
    struct sim_launch launched[SIM_CARDS][SIM_RING] __attribute__((aligned(SIM_LINE)));
};

/* How long operations take; common/timing.c. */
struct sim_timing {
    uint64_t launch_ns;           /* from a launch or a record to its start on an idle card */
    uint64_t record_ns, query_ns; /* minimum time of recording and of querying an event */
    uint64_t event_ns;            /* time that a timed event takes on the card */
    uint64_t load_ns;             /* time to load a function's code, on the host */
    /* a launch returns when its process has no more work than this left on the card; SIM_NEVER: at once */
    uint64_t queued_ns;
    uint64_t remap_ns; /* unmapping, mapping and setting access, together */
    /* bus: bytes per microsecond; fault_ns: time per group of managed memory that is not on the card, in addition to
     * its bytes */
    uint64_t bus, fault_ns;
    bool load_on_get;                     /* when the program asks for the function, not at its first use */
    uint64_t memory;                      /* bytes per microsecond that the card's memory reads or writes */
    bool fills_take_sms, copies_take_sms; /* fills, and copies within a card, run as kernels; else on an engine */
    bool fills, within;                   /* whether they take time */
    /* copies: copies, and memory behind the bus, take time; migrate: managed memory comes and goes */
    bool copies, migrate;
    uint32_t kernels;
};

/* One opened state directory. `self` is NULL in a process that only reads. */
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
/* The driver of PROFILE[xN][@DRIVER]; NULL: unknown. */
const struct sim_driver *sim_driver_of_spec(const char *spec);
/* The driver that this process sees: VGPU_SIM_DRIVER, else the spec's driver, else the newest. */
const struct sim_driver *sim_driver(void);
/* Parses PROFILE[xN][@DRIVER]; returns the profile's index or -1. */
int sim_spec_parse(const char *spec, uint32_t *cards);
uint64_t sim_usable(const struct sim_profile *profile);

uint64_t sim_now(void);
uint64_t sim_wall_us(void);
/* Finds the default directory (rules in vgpu/simulator.h); returns 0 or -ENAMETOOLONG. */
int sim_directory(char *out, unsigned long size);
int sim_open(struct sim *sim, const char *dir);
void sim_close(struct sim *sim);
/* Opens the directory that the environment names, and makes it if VGPU_SIMULATE asks for it. 0, -ENOENT: none, -EEXIST:
 * made for another spec. */
int sim_open_environment(struct sim *sim);

/* Fills the cards that NVIDIA_VISIBLE_DEVICES leaves to this process, as the container runtime would. -1: "void", so
 * there is no driver. */
int sim_container_cards(const struct sim *sim, int cards[SIM_CARDS]);
/* PCI domain and bus of a card. */
void sim_pci_address(const struct sim *sim, int card, unsigned *domain, unsigned *bus);

/* Lets this process hold memory and run kernels; 0 or a negative errno. */
int sim_register(struct sim *sim);
/* Whether the lock of a slot's process is held; if not, marks the slot as dead. */
bool sim_alive(struct sim *sim, uint32_t slot);
bool sim_self_valid(const struct sim *sim);
struct sim_process *sim_peer(struct sim *sim, uint32_t slot);
/* Start time in clock ticks since boot; `name` is a name below /proc: a pid or "self"; 0: unknown. */
uint64_t sim_start_time(const char *name);

/* Returns true if the caller replaced a dead holder: it must then repair what the lock guards. */
bool sim_acquire(struct sim *sim, sim_lock *lock);
void sim_release(sim_lock *lock);

/* 0; -ENOMEM: the card is full; -EIO: this process lost its slot. */
int sim_charge(struct sim *sim, int card, uint64_t bytes);
void sim_uncharge(struct sim *sim, int card, uint64_t bytes);
/* Managed memory on the card that comes and goes. A process believes that `managed` + `taken` bytes are on the card. */
/* Charged bytes become managed memory and stop being host memory. */
void sim_managed_came(struct sim *sim, int card, uint64_t bytes);
/* Managed memory leaves the card; `lost`: first count the bytes that other processes have taken. */
void sim_managed_go(struct sim *sim, int card, uint64_t bytes, bool lost);
/* Takes up to `bytes` from the process whose managed memory was touched longest ago, before `before_ns`; returns how
 * much. */
uint64_t sim_managed_take(struct sim *sim, int card, uint64_t bytes, uint64_t before_ns);

/* common/host.c: host memory of the driver, which has no limit here. It is counted per process and per card. */
void sim_host_add(struct sim *sim, int card, uint64_t bytes);
void sim_host_note(struct sim_share_of_card *share, uint64_t bytes); /* the same, for any process */
void sim_host_sub(struct sim *sim, int card, uint64_t bytes);
/* Like sim_transfer. */
bool sim_host_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes);
/* Sum over live processes. */
uint64_t sim_host(struct sim *sim, int card);
/* The machine's NUMA nodes, and the node next to a card: each half of the cards has one node. */
int sim_nodes(const struct sim *sim);
int sim_node_of(const struct sim *sim, int card);

/* Moves bytes that this process pays for to another process; false: that process is gone. */
bool sim_transfer(struct sim *sim, int card, uint32_t slot, uint32_t generation, uint64_t bytes);
/* Recounts the bytes in use by live processes. */
uint64_t sim_used(struct sim *sim, int card);

/* The code that this call of an entry point must return; 0: none. Call it only while errors are armed. */
int sim_fault(struct sim *sim, const char *entry);
static inline bool sim_faults_armed(const struct sim *sim) {
    return __builtin_expect(sim->state && atomic_load_explicit(&sim->state->faults_armed, memory_order_relaxed) > 0, 0);
}

/* A point in this process's work on a card: after one launch, and after all launches up to another; 0: none. */
struct sim_mark {
    uint64_t launch, prefix;
};
/* Gives a launch to the card; waits while this process has SIM_IN_FLIGHT launches there. Returns its sequence, from 1;
 * 0: this process lost its slot. `width`: in 1/SIM_WHOLE; 0: an event. */
uint64_t sim_launch(struct sim *sim, int card, uint64_t duration, uint32_t width, uint64_t not_before,
                    struct sim_mark after, uint32_t group);
/* The group of kernels with this key that meet on `size` cards, from 1; 0: no room for another group. */
uint32_t sim_group(struct sim *sim, uint64_t key, uint32_t size);
/* Records that this process lives now: if it dies, its work continues until this time. */
void sim_seen(struct sim *sim);
/* If launches return late, waits until little enough work is queued. */
void sim_wait_queued(struct sim *sim, int card);
/* Gives a copy that may start at `begin` to an engine of the card; returns when the copy ends. */
uint64_t sim_engine(struct sim *sim, int card, enum sim_engine_kind engine, uint64_t begin, uint64_t duration);
/* Moves the card's time to now; cheap if the card has nothing to do. */
void sim_advance(struct sim *sim, int card);
/* Takes the card's time lock, moves the card's time to now, and returns that time. */
uint64_t sim_time_begin(struct sim *sim, int card);
/* Call with the card's time lock held. */
void sim_advance_locked(struct sim *sim, int card, uint64_t now);
/* Call with the card's time lock held, after advancing. Returns a time before which the mark is not reached; *shared:
 * that time may also become earlier, because other processes are ahead. */
uint64_t sim_predict(struct sim *sim, int card, struct sim_mark mark, bool *shared);
bool sim_reached(struct sim *sim, int card, struct sim_mark mark);
/* Whether all launches up to the sequence have ended. */
bool sim_finished(struct sim *sim, int card, uint64_t sequence);
/* When a reached mark was reached; 0 for an empty mark. */
uint64_t sim_reached_at(struct sim *sim, int card, struct sim_mark mark);
/* Sleeps until a mark is reached. */
void sim_wait_mark(struct sim *sim, int card, struct sim_mark mark);
/* The same for all launches up to the sequence; 0: returns at once. */
void sim_wait(struct sim *sim, int card, uint64_t sequence);
void sim_sleep_until(uint64_t deadline);
/* When a mark will be reached if nothing changes. */
uint64_t sim_expected_end(struct sim *sim, int card, struct sim_mark mark);
/* Time up to `now` in which a process had work but not the card. */
uint64_t sim_waited(struct sim *sim, int card, uint32_t slot, uint64_t now);

/* common/usage.c */
void sim_usage_note(struct sim_usage *usage, uint64_t now, uint64_t busy);
/* Share of the last second in which the card (slot < 0) or one process ran kernels, in parts per million, up to the
 * last sample. With `seen_ns` (CLOCK_MONOTONIC; 0: none), only samples newer than that count. *sampled_ns: time of the
 * last sample. *some: there is a newer sample, and the process ran. */
uint32_t sim_share(struct sim *sim, int card, int slot, uint64_t seen_ns, uint64_t *sampled_ns, bool *some);

/* common/timing.c */
#define SIM_SLICE_NS 2000000ull
#define SIM_SWITCH_NS 10000ull
/* Reads VGPU_SIM_TIME; the cards' own times go into the state. -EINVAL, with a message: not allowed. */
int sim_timing_read(struct sim *sim);
#endif
