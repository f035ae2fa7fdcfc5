/* The outside view of a region: the node agent, `vgpu run` and tests use it to create, change and read regions.
 *
 * Everything here is plain C that cffi parses (vgpu/native), so that the layout of the files (vgpu/region.h) is written
 * once. Sizes are bytes, times are nanoseconds, core shares are percent of one card. Functions return 0 or a negative
 * errno unless stated otherwise. */
#ifndef VGPU_AGENT_H
#define VGPU_AGENT_H
#include <stdint.h>

/* cffi: begin */
#define VGPU_MAX_CARDS 16
#define VGPU_MAX_PROCESSES 1024
#define VGPU_UUID_SIZE 48
#define VGPU_KINDS 6
#define VGPU_NO_LIMIT 0xffffffffffffffff

/* use of device memory; index of by_kind */
enum vgpu_kind {
    VGPU_KIND_CONTEXT,
    VGPU_KIND_MODULE,
    VGPU_KIND_BUFFER,
    VGPU_KIND_ARRAY,
    VGPU_KIND_POOL,
    VGPU_KIND_OVERHEAD
};
/* which rule sets the core limit */
enum vgpu_core_policy { VGPU_CORES_FIXED, VGPU_CORES_ELASTIC, VGPU_CORES_NONE };
enum vgpu_limit_flag {
    VGPU_ALLOW_DISABLE_CONTROL = 1,
    /* memory beyond the guarantee lies in host memory; never changes during the life of the region */
    VGPU_OVERSUBSCRIBE = 2,
    VGPU_KILL_ON_OOM = 4,
    /* with VGPU_OVERSUBSCRIBE: blocks may move between the card and host memory; never changes either */
    VGPU_MOVABLE = 8,
    /* fills (cuMemset...) run on a copy engine of this card and keep no kernel waiting: they are not paced */
    VGPU_FILLS_ON_ENGINE = 16,
    /* copies within a card run on the multiprocessors and keep kernels waiting: they are paced */
    VGPU_COPIES_ON_SMS = 32,
};

struct vgpu_card_limit {
    char uuid[48];          /* "GPU-..." as NVML prints it, NUL-terminated */
    uint64_t memory;        /* what the container may allocate; VGPU_NO_LIMIT: no limit */
    uint64_t guarantee;     /* the part of `memory` that is guaranteed on the card */
    uint64_t context_bytes; /* measured cost of one context on this card and driver; 0: unknown */
    uint32_t cores;         /* guaranteed share, 0: no core limit */
    uint32_t cores_ceiling; /* elastic: highest share */
};

struct vgpu_limits {
    uint32_t card_count;
    uint32_t flags;       /* enum vgpu_limit_flag */
    uint32_t core_policy; /* enum vgpu_core_policy */
    uint32_t priority;    /* 0 high, 1 low */
    uint64_t host_memory; /* host memory allowed behind each card; 0: none, VGPU_NO_LIMIT: no limit */
    uint32_t burst_ms;    /* most credit of an idle container, in ms of wall time: 20 to 100; 0: 50 */
    uint32_t reserved;
    struct vgpu_card_limit cards[16];
};

struct vgpu_card_usage {
    uint64_t used;      /* the account's word: limits are tested against it */
    uint64_t host_used; /* the part in host memory */
    uint64_t resident;  /* the part really on the card; 0 without VGPU_OVERSUBSCRIBE */
    /* most that the container may hold on the card above its guarantee: the last vgpu_lent_write */
    uint64_t lent;
    uint64_t by_kind[6];   /* enum vgpu_kind; a statistic of live processes */
    uint64_t gpu_ns;       /* GPU time charged since the region was made */
    uint64_t throttled_ns; /* time that launches have waited for the core limit */
    uint64_t launches;
    uint64_t refused; /* allocations that the limit refused (out of memory) */
    uint32_t processes;
};

struct vgpu_process_usage {
    int32_t pid; /* as the process itself sees it (its own pid namespace) */
    uint32_t slot;
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    uint64_t start_time;    /* clock ticks since boot, /proc/PID/stat field 22 */
    uint64_t used[16];      /* charge per card of the limits file */
    uint64_t host[16];      /* the part in host memory */
    uint64_t resident[16];  /* the part really on the card; 0 without VGPU_OVERSUBSCRIBE */
    uint64_t by_kind[16][6];
    uint64_t gpu_ns[16];
    uint64_t throttled_ns[16];
    uint64_t launches[16];
};

struct vgpu_usage {
    uint32_t process_count;
    uint32_t unhooked;  /* entry points that the driver offered and no hook covers */
    uint32_t saturated; /* releases of more bytes than were charged: an accounting error, 0 in a sound region */
    struct vgpu_card_usage cards[16];
    struct vgpu_process_usage processes[1024];
};

typedef struct vgpu_region vgpu_region;

/* Makes DIR/limits (mode 0644) and DIR/usage (mode 0666), for any umask. A container's processes may run as any user,
 * so access to DIR decides. `usage` appears first and `limits` last, so that a process that sees `limits` sees a whole
 * region. Errors: -EEXIST if the region exists, -EINVAL (impossible limits), or the file system's error. */
int vgpu_region_create(const char *dir, const struct vgpu_limits *limits);
/* Maps an existing region; writable: the caller may change limits and reap. Errors: -ENOENT, -EPROTO (not a region of
 * this ABI and boot), -EACCES. */
int vgpu_region_open(const char *dir, int writable, vgpu_region **out);
void vgpu_region_close(vgpu_region *region);
int vgpu_limits_read(vgpu_region *region, struct vgpu_limits *out);
/* Publishes new limits in place: readers see either the old or the new limits, even if the writer is killed. -EBADF:
 * opened read-only. */
int vgpu_limits_write(vgpu_region *region, const struct vgpu_limits *limits);
/* Publishes in place how many bytes the container may hold on a card (index into the limits) above its guarantee; 0 at
 * the beginning. If the container holds more, it must move memory away, at its next safe point. Only for movable
 * containers: other containers keep what they hold. -EBADF: opened read-only; -EINVAL: no such card. */
int vgpu_lent_write(vgpu_region *region, uint32_t card, uint64_t bytes);
/* Reads the usage, consistent enough for metrics; `out` must hold a whole struct vgpu_usage. */
int vgpu_usage_read(vgpu_region *region, struct vgpu_usage *out);
/* Frees the charges of dead processes; returns how many slots were freed. -EBADF: opened read-only. */
int vgpu_region_reap(vgpu_region *region);
/* Charges GPU time that the container used on a card (index into the limits) without a charge. Its next launches pay it
 * back, by at most ten seconds of waiting. -EBADF: opened read-only; -EINVAL: no such card. */
int vgpu_region_debit(vgpu_region *region, uint32_t card, uint64_t gpu_ns);
/* Sets the overhead that this handle charges on a card (index into the limits) to `bytes`, without a limit test.
 * Overhead is memory that the driver took for processes of the container and that the container did not charge. The
 * charge lasts as long as the handle is open; after that it counts as a dead process's charge. -EBADF: opened
 * read-only; -EINVAL: no such card; -ENOSPC: no slot is left. */
int vgpu_region_charge_overhead(vgpu_region *region, uint32_t card, uint64_t bytes);

/* One container on one card, as the arbiter sees it. Shares are percent of the card's time. */
struct vgpu_arbiter_view {
    uint32_t active; /* the container has work */
    uint32_t demand; /* what the container would use without limits; 100: as much as it gets */
    uint32_t cores;  /* as in its limits */
    uint32_t ceiling;
    uint32_t policy;   /* enum vgpu_core_policy */
    uint32_t priority; /* 0 high, 1 low */
    /* the fields from here on are answers */
    /* what the container may use now; without work: what it may use as soon as it has work */
    uint32_t share;
    uint32_t yield;      /* 1: the container has low priority, and a high-priority container has work */
    uint32_t neighbours; /* other containers that have work */
};
/* Divides the time of one card among the containers with work: first their guarantees, then the rest up to the
 * ceilings. The weight of the rest is the guarantee, at least 1. Low priority keeps 2 % while high priority has work. A
 * pure function; at most 64 containers, further containers get no answer. */
void vgpu_arbiter_shares(struct vgpu_arbiter_view *views, uint32_t count);

struct vgpu_arbiter_state {
    uint64_t passes;     /* looks at all containers since the start */
    uint64_t cpu_ns;     /* CPU time of the thread in vgpu_arbiter_run */
    uint32_t containers; /* attached containers */
    uint32_t active;     /* attached containers that had work on some card at the last look */
};

typedef struct vgpu_arbiter vgpu_arbiter;

/* NULL: no memory. */
vgpu_arbiter *vgpu_arbiter_new(void);
/* Looks at the containers about every 10 ms while one of them has work, every 20 ms if nothing changes, else every 50
 * ms. Publishes into their limits. Returns after vgpu_arbiter_stop. One thread at a time. */
void vgpu_arbiter_run(vgpu_arbiter *arbiter);
void vgpu_arbiter_stop(vgpu_arbiter *arbiter);
/* One look, for a caller with a loop of its own. */
void vgpu_arbiter_look(vgpu_arbiter *arbiter);
/* Attaches the region in DIR; no effect if it is attached already. Any thread may call this, also while
 * vgpu_arbiter_run runs. Errors: as vgpu_region_open, -ENOMEM. */
int vgpu_arbiter_attach(vgpu_arbiter *arbiter, const char *dir);
/* Detaches the region in DIR and clears its heartbeat; no effect if it is not attached. */
void vgpu_arbiter_detach(vgpu_arbiter *arbiter, const char *dir);
void vgpu_arbiter_state(vgpu_arbiter *arbiter, struct vgpu_arbiter_state *out);
/* Only when no thread uses the arbiter any more. */
void vgpu_arbiter_free(vgpu_arbiter *arbiter);
/* cffi: end */
#endif
