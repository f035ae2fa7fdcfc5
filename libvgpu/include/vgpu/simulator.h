/* The simulator's truth: what its cards really hold and really ran, kept apart from every ledger so that tests can
 * compare.
 *
 * State lives in a directory (VGPU_SIM_DIR) that all processes share; it survives kill -9 of any of them. Sizes in
 * bytes, times in nanoseconds.
 */
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
    uint64_t context_bytes; /* what one context costs */
    uint64_t module_bytes;  /* what loading one module costs */
    uint64_t used;          /* all live processes: contexts, modules, allocations */
    uint64_t peak;          /* largest value of used since the state was made */
    /* time in which at least one kernel ran; the card's changes from process to process not included */
    uint64_t busy_ns;
    uint64_t switches; /* such changes */
    uint32_t processes;
    /* host memory of the driver that live processes have for this card: pinned, registered, physical (cuMemCreate) */
    uint64_t host;
};

struct vgpu_sim_process {
    int32_t pid;
    uint32_t alive;
    uint64_t start_time; /* clock ticks since boot, /proc/PID/stat field 22 */
    uint64_t used[16];   /* bytes now, per card */
    uint64_t peak[16];
    uint64_t busy_ns[16];   /* time in which at least one kernel of it really ran, per card */
    uint64_t waited_ns[16]; /* time in which it had work for the card that did not run, as others had their turn */
    uint64_t launches[16];
    /* host memory of the driver now, by the card it is there for: that of the current context, else the first
     * visible one */
    uint64_t host[16];
    uint64_t host_peak[16];
    uint64_t faults[16]; /* launches whose memory was not there, or was unmapped before they had ended */
};

/* Makes the state directory for `spec` (PROFILE[xN][@DRIVER], e.g. "T4", "T4x2", "H100x8@12.4"); nothing happens when
 * it is there with the same spec. -EINVAL: unknown profile or driver, or more than VGPU_SIM_MAX_CARDS cards, -EEXIST:
 * made for another spec. */
int vgpu_sim_create(const char *dir, const char *spec);
/* Fills at most `capacity` cards; returns their number or a negative errno. */
int vgpu_sim_cards(const char *dir, struct vgpu_sim_card *out, int capacity);
/* Fills at most `capacity` processes, dead ones whose files remain included (alive 0); returns their number or a
 * negative errno. */
int vgpu_sim_processes(const char *dir, struct vgpu_sim_process *out, int capacity);
/* Comma-separated names of the profiles; static storage. */
const char *vgpu_sim_profiles(void);
/* Comma-separated CUDA versions of the drivers that can be played, the newest (the default) first; static storage. */
const char *vgpu_sim_drivers(void);
/* Marks a card (by index) unhealthy: the next NVML event wait reports this XID; 0 clears. */
int vgpu_sim_inject_xid(const char *dir, int card, uint32_t xid);
/* From now on the nth call (1: the next one) of an entry point, of any process, answers `code` once, before it does
 * anything else. `entry` is an exported name of either library ("cuMemAlloc_v2", "nvmlDeviceGetCount_v2"); a call
 * counts for every entry point that it passes through, so a per-thread variant counts for its plain form too. nth 0
 * takes the entry's error back, "" with nth 0 all of them. Arming an entry again replaces its error. -EINVAL: code not
 * positive or a name too long, -ENOSPC: 32 entries are armed. */
int vgpu_sim_inject_error(const char *dir, const char *entry, uint64_t nth, int code);
/* cffi: end */
#endif
