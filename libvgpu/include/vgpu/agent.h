/* The outside view of a region: what the node agent, `vgpu run` and tests create, change and read.
 *
 * Everything here is plain C that cffi parses (vgpu/native), so that the layout of the files themselves (vgpu/region.h)
 * is written once. Sizes are bytes, times are nanoseconds, core shares are percent of one card. Functions return 0 or a
 * negative errno unless stated.
 */
#ifndef VGPU_AGENT_H
#define VGPU_AGENT_H
#include <stdint.h>

/* cffi: begin */
#define VGPU_MAX_CARDS 16
#define VGPU_MAX_PROCESSES 1024
#define VGPU_UUID_SIZE 48
#define VGPU_KINDS 6
#define VGPU_NO_LIMIT 0xffffffffffffffff

/* what device memory is used for; index of by_kind */
enum vgpu_kind {
    VGPU_KIND_CONTEXT,
    VGPU_KIND_MODULE,
    VGPU_KIND_BUFFER,
    VGPU_KIND_ARRAY,
    VGPU_KIND_POOL,
    VGPU_KIND_OVERHEAD
};
/* who decides about a core limit */
enum vgpu_core_policy { VGPU_CORES_FIXED, VGPU_CORES_ELASTIC, VGPU_CORES_NONE };
enum vgpu_limit_flag {
    VGPU_ALLOW_DISABLE_CONTROL = 1,
    /* what does not fit into the guarantee lies in host memory; set or not for as long as the region is there */
    VGPU_OVERSUBSCRIBE = 2,
    VGPU_KILL_ON_OOM = 4,
    /* with VGPU_OVERSUBSCRIBE: blocks may move between the card and host memory; as long as that */
    VGPU_MOVABLE = 8,
    VGPU_FILLS_ON_ENGINE = 16, /* fills (cuMemset...) keep no kernel from the card here: they are not paced */
    VGPU_COPIES_ON_SMS = 32,   /* copies within a card do: they are paced */
};

struct vgpu_card_limit {
    char uuid[48];          /* "GPU-..." as NVML prints it, NUL-terminated */
    uint64_t memory;        /* what the container may allocate; VGPU_NO_LIMIT: no limit */
    uint64_t guarantee;     /* the physical part of it */
    uint64_t context_bytes; /* learned cost of one context on this card and driver; 0: unknown */
    uint32_t cores;         /* guaranteed share, 0: no core limit */
    uint32_t cores_ceiling; /* elastic: never above this share */
};

struct vgpu_limits {
    uint32_t card_count;
    uint32_t flags;       /* enum vgpu_limit_flag */
    uint32_t core_policy; /* enum vgpu_core_policy */
    uint32_t priority;    /* 0 high, 1 low */
    uint64_t host_memory; /* budget of host memory behind each card; 0: none, VGPU_NO_LIMIT: no limit */
    uint32_t burst_ms;    /* GPU time that idling earns at most, in ms of wall time: 20 to 100; 0: 50 */
    uint32_t reserved;
    struct vgpu_card_limit cards[16];
};

struct vgpu_card_usage {
    uint64_t used;         /* the account's word: what limits are tested against */
    uint64_t host_used;    /* of that, in host memory */
    uint64_t resident;     /* of that, really on the card; 0 without VGPU_OVERSUBSCRIBE */
    uint64_t lent;         /* what it may hold on the card above its guarantee: the last vgpu_lent_write */
    uint64_t by_kind[6];   /* enum vgpu_kind; a statistic of live processes */
    uint64_t gpu_ns;       /* GPU time charged since the region was made */
    uint64_t throttled_ns; /* time that launches waited for the core limit */
    uint64_t launches;
    uint64_t refused; /* allocations answered with out-of-memory by the limit */
    uint32_t processes;
};

struct vgpu_process_usage {
    int32_t pid; /* as the process itself sees it (its own pid namespace) */
    uint32_t slot;
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    uint64_t start_time;    /* clock ticks since boot, /proc/PID/stat field 22 */
    uint64_t used[16];      /* charge per card of the limits file */
    uint64_t host[16];      /* of that, in host memory */
    uint64_t resident[16];  /* of that, really on the card; 0 without VGPU_OVERSUBSCRIBE */
    uint64_t by_kind[16][6];
    uint64_t gpu_ns[16];
    uint64_t throttled_ns[16];
    uint64_t launches[16];
};

struct vgpu_usage {
    uint32_t process_count;
    uint32_t unhooked;  /* entry points that the driver answered and no hook covers */
    uint32_t saturated; /* releases of more than was charged: an error of the accounting, 0 in a sound region */
    struct vgpu_card_usage cards[16];
    struct vgpu_process_usage processes[1024];
};

typedef struct vgpu_region vgpu_region;

/* Makes DIR/limits (mode 0644) and DIR/usage (0666: a container's processes may run as any user; who can reach DIR
 * decides), whatever the umask. `usage` appears first and `limits` last, so that whoever sees `limits` sees a whole
 * region. Errors: -EEXIST if there, -EINVAL (limits that make no sense), or what the file system says. */
int vgpu_region_create(const char *dir, const struct vgpu_limits *limits);
/* Maps an existing region; writable: may change limits and reap. Errors: -ENOENT, -EPROTO (not a region of this ABI and
 * boot), -EACCES. */
int vgpu_region_open(const char *dir, int writable, vgpu_region **out);
void vgpu_region_close(vgpu_region *region);
int vgpu_limits_read(vgpu_region *region, struct vgpu_limits *out);
/* Publishes new limits in place: readers see the old ones or the new ones, never a mixture, even if the writer is
 * killed. -EBADF: opened read-only. */
int vgpu_limits_write(vgpu_region *region, const struct vgpu_limits *limits);
/* Publishes in place how many bytes the container may hold on a card (index into the limits) above its guarantee; 0 at
 * the beginning. Less than it holds means that it has to give way, which takes it until its next safe point. For
 * movable containers alone: what others hold stays. -EBADF: opened read-only; -EINVAL: no such card. */
int vgpu_lent_write(vgpu_region *region, uint32_t card, uint64_t bytes);
/* A consistent enough picture for metrics; out must hold a whole struct vgpu_usage. */
int vgpu_usage_read(vgpu_region *region, struct vgpu_usage *out);
/* Frees the charges of dead processes; returns how many slots were freed. -EBADF: opened read-only. */
int vgpu_region_reap(vgpu_region *region);
/* Charges GPU time on a card (index into the limits) that the container has used and has not been charged for: its next
 * launches pay it back, ten seconds of waiting at most. -EBADF: opened read-only; -EINVAL: no such card. */
int vgpu_region_debit(vgpu_region *region, uint32_t card, uint64_t gpu_ns);
/* Makes the overhead that this handle charges on a card (index into the limits) equal to `bytes`, without a limit test:
 * memory that the driver has taken for processes of the container and that the container has not charged itself. It
 * stays as long as the handle is open; afterwards it counts as a dead process's. -EBADF: opened read-only; -EINVAL: no
 * such card; -ENOSPC: no slot is left. */
int vgpu_region_charge_overhead(vgpu_region *region, uint32_t card, uint64_t bytes);

/* One container on one card, as the arbiter sees it. Shares are percent of the card's time. */
struct vgpu_arbiter_view {
    uint32_t active; /* it has work */
    uint32_t demand; /* what it would use if nothing held it back; 100: as much as it gets */
    uint32_t cores;  /* as in its limits */
    uint32_t ceiling;
    uint32_t policy;   /* enum vgpu_core_policy */
    uint32_t priority; /* 0 high, 1 low */
    /* answers */
    /* what it may use now; of a container without work: what it may use as soon as it has some */
    uint32_t share;
    uint32_t yield;      /* 1: low priority, and one of high priority has work */
    uint32_t neighbours; /* others that have work */
};
/* Divides the time of one card: first what each container with work is guaranteed, then what is left, by weight (the
 * guarantee; at least 1) up to the ceilings. Low priority keeps a floor of 2 % while high priority has work. Pure; at
 * most 64 containers, further ones get no answer. */
void vgpu_arbiter_shares(struct vgpu_arbiter_view *views, uint32_t count);

struct vgpu_arbiter_state {
    uint64_t passes;     /* looks at all containers since the start */
    uint64_t cpu_ns;     /* CPU time of the thread in vgpu_arbiter_run */
    uint32_t containers; /* attached */
    uint32_t active;     /* of them, with work on some card at the last look */
};

typedef struct vgpu_arbiter vgpu_arbiter;

/* NULL: no memory. */
vgpu_arbiter *vgpu_arbiter_new(void);
/* Looks at the containers about every 10 ms while one of them has work (20 ms where nothing changes), else every 50 ms,
 * and publishes into their limits; returns after vgpu_arbiter_stop. One thread at a time. */
void vgpu_arbiter_run(vgpu_arbiter *arbiter);
void vgpu_arbiter_stop(vgpu_arbiter *arbiter);
/* One look, for whoever drives it himself. */
void vgpu_arbiter_look(vgpu_arbiter *arbiter);
/* Takes the region in DIR in; harmless when it is. From any thread, also while vgpu_arbiter_run is at work. Errors: as
 * vgpu_region_open, -ENOMEM. */
int vgpu_arbiter_attach(vgpu_arbiter *arbiter, const char *dir);
/* Lets it go, with its heartbeat cleared; harmless when it is not attached. */
void vgpu_arbiter_detach(vgpu_arbiter *arbiter, const char *dir);
void vgpu_arbiter_state(vgpu_arbiter *arbiter, struct vgpu_arbiter_state *out);
/* Only when no thread uses it any more. */
void vgpu_arbiter_free(vgpu_arbiter *arbiter);
/* cffi: end */
#endif
