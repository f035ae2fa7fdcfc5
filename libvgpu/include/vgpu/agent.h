/* The outside view of a region: what the node agent, `vgpu run` and tests create, change and read.
 *
 * Everything here is plain C that cffi parses (vgpu/native), so that the layout of the files themselves (vgpu/region.h) is written once.
 * Sizes are bytes, times are nanoseconds, core shares are percent of one card. Functions return 0 or a negative errno unless stated.
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
enum vgpu_kind { VGPU_KIND_CONTEXT, VGPU_KIND_MODULE, VGPU_KIND_BUFFER, VGPU_KIND_ARRAY, VGPU_KIND_POOL, VGPU_KIND_OVERHEAD };
/* who decides about a core limit */
enum vgpu_core_policy { VGPU_CORES_FIXED, VGPU_CORES_ELASTIC, VGPU_CORES_NONE };
enum vgpu_limit_flag { VGPU_ALLOW_DISABLE_CONTROL = 1, VGPU_OVERSUBSCRIBE = 2, VGPU_KILL_ON_OOM = 4 };

struct vgpu_card_limit {
    char uuid[48];           /* "GPU-..." as NVML prints it, NUL-terminated */
    uint64_t memory;         /* what the container may allocate; VGPU_NO_LIMIT: no limit */
    uint64_t guarantee;      /* the physical part of it */
    uint64_t context_bytes;  /* learned cost of one context on this card and driver; 0: unknown */
    uint32_t cores;          /* guaranteed share, 0: no core limit */
    uint32_t cores_ceiling;  /* elastic: never above this share */
};

struct vgpu_limits {
    uint32_t card_count;
    uint32_t flags;          /* enum vgpu_limit_flag */
    uint32_t core_policy;    /* enum vgpu_core_policy */
    uint32_t priority;       /* 0 high, 1 low */
    uint64_t host_memory;    /* budget of host memory behind each card; 0: none, VGPU_NO_LIMIT: no limit */
    uint32_t burst_ms;       /* GPU time that idling earns at most, in ms of wall time: 20 to 100; 0: 50 */
    uint32_t reserved;
    struct vgpu_card_limit cards[16];
};

struct vgpu_card_usage {
    uint64_t used;           /* the account's word: what limits are tested against */
    uint64_t host_used;
    uint64_t by_kind[6];     /* enum vgpu_kind; a statistic of live processes */
    uint64_t gpu_ns;         /* GPU time charged since the region was made */
    uint64_t throttled_ns;   /* time that launches waited for the core limit */
    uint64_t launches;
    uint64_t refused;        /* allocations answered with out-of-memory by the limit */
    uint32_t processes;
};

struct vgpu_process_usage {
    int32_t pid;             /* as the process itself sees it (its own pid namespace) */
    uint32_t slot;
    uint64_t pid_namespace;  /* inode of /proc/self/ns/pid */
    uint64_t start_time;     /* clock ticks since boot, /proc/PID/stat field 22 */
    uint64_t used[16];       /* charge per card of the limits file */
    uint64_t by_kind[16][6];
    uint64_t gpu_ns[16];
    uint64_t throttled_ns[16];
    uint64_t launches[16];
};

struct vgpu_usage {
    uint32_t process_count;
    uint32_t unhooked;       /* entry points that the driver answered and no hook covers */
    uint32_t saturated;      /* releases of more than was charged: an error of the accounting, 0 in a sound region */
    struct vgpu_card_usage cards[16];
    struct vgpu_process_usage processes[1024];
};

typedef struct vgpu_region vgpu_region;

/* Makes DIR/limits (mode 0644) and DIR/usage (0666: a container's processes may run as any user; who can reach DIR decides), whatever the
 * umask. `usage` appears first and `limits` last, so that whoever sees `limits` sees a whole region. Errors: -EEXIST if there, -EINVAL (limits
 * that make no sense), or what the file system says. */
int vgpu_region_create(const char *dir, const struct vgpu_limits *limits);
/* Maps an existing region; writable: may change limits and reap. Errors: -ENOENT, -EPROTO (not a region of this ABI and boot), -EACCES. */
int vgpu_region_open(const char *dir, int writable, vgpu_region **out);
void vgpu_region_close(vgpu_region *region);
int vgpu_limits_read(vgpu_region *region, struct vgpu_limits *out);
/* Publishes new limits in place: readers see the old ones or the new ones, never a mixture, even if the writer is killed. -EBADF: opened
 * read-only. */
int vgpu_limits_write(vgpu_region *region, const struct vgpu_limits *limits);
/* A consistent enough picture for metrics; out must hold a whole struct vgpu_usage. */
int vgpu_usage_read(vgpu_region *region, struct vgpu_usage *out);
/* Frees the charges of dead processes; returns how many slots were freed. -EBADF: opened read-only. */
int vgpu_region_reap(vgpu_region *region);
/* cffi: end */
#endif
