/* The simulator's truth: what its cards really hold and really ran. It is kept apart from every ledger so that tests
 * can compare the two.
 *
 * The state lives in a directory (VGPU_SIM_DIR) that all processes share. It survives kill -9 of any of them. Sizes in
 * bytes, times in nanoseconds. */
#ifndef VGPU_SIMULATOR_H
#define VGPU_SIMULATOR_H
#include <stdint.h>

/* cffi: begin */
#define VGPU_SIM_MAX_CARDS 16

struct vgpu_sim_card {
    char uuid[48];
    char model[96];
    uint64_t memory;        /* what CUDA can use (cuDeviceTotalMem); NVML's total is this + reserved */
    uint64_t reserved;      /* NVML's v2 `reserved` */
    uint64_t context_bytes; /* cost of one context */
    uint64_t module_bytes;  /* cost of loading one module */
    uint64_t used;          /* by all live processes: contexts, modules, allocations */
    uint64_t peak;          /* largest value of used so far */
    /* time in which at least one kernel ran, without the card's changes between processes */
    uint64_t busy_ns;
    uint64_t switches; /* number of such changes */
    uint32_t processes;
    /* the driver's host memory of live processes for this card: pinned, registered, physical (cuMemCreate) */
    uint64_t host;
};

struct vgpu_sim_process {
    int32_t pid;
    uint32_t alive;
    uint64_t start_time; /* clock ticks since boot, /proc/PID/stat field 22 */
    uint64_t used[16];   /* bytes now, per card */
    uint64_t peak[16];
    uint64_t busy_ns[16]; /* time in which at least one kernel of the process really ran, per card */
    /* time in which the process had work that did not run, because another process had its turn */
    uint64_t waited_ns[16];
    uint64_t launches[16];
    /* the driver's host memory now, by the card of the current context, else by the first visible card */
    uint64_t host[16];
    uint64_t host_peak[16];
    uint64_t faults[16]; /* launches whose memory was missing, or was unmapped before the launch had ended */
};

/* Makes the state directory for `spec` (PROFILE[xN][@DRIVER], e.g. "T4", "T4x2", "H100x8@12.4"). No effect if it exists
 * with the same spec. -EINVAL: unknown profile or driver, or more than VGPU_SIM_MAX_CARDS cards; -EEXIST: made for
 * another spec. */
int vgpu_sim_create(const char *dir, const char *spec);
/* Fills at most `capacity` cards; returns their number or a negative errno. */
int vgpu_sim_cards(const char *dir, struct vgpu_sim_card *out, int capacity);
/* Fills at most `capacity` processes, also dead ones whose files remain (alive 0); returns their number or a negative
 * errno. */
int vgpu_sim_processes(const char *dir, struct vgpu_sim_process *out, int capacity);
/* Comma-separated names of the profiles; static storage. */
const char *vgpu_sim_profiles(void);
/* Comma-separated CUDA versions of the drivers that the simulator can play, the newest (the default) first; static
 * storage. */
const char *vgpu_sim_drivers(void);
/* Marks a card (by index) unhealthy: the next NVML event wait reports this XID; 0 clears. */
int vgpu_sim_inject_xid(const char *dir, int card, uint32_t xid);
/* Lets the nth next call (1: the next one) of an entry point fail once with `code`, in any process, before the call has
 * any effect. `entry` is an exported name of either library ("cuMemAlloc_v2", "nvmlDeviceGetCount_v2"). A call counts
 * for every entry point that it passes, so a per-thread variant counts for its plain form too. nth 0 removes the
 * entry's error; "" with nth 0 removes all errors. A second error for an entry replaces the first. -EINVAL: code not
 * positive, or a name too long; -ENOSPC: 32 entries already have errors. */
int vgpu_sim_inject_error(const char *dir, const char *entry, uint64_t nth, int code);
/* cffi: end */
#endif
