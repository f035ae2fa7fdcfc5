/* The layout of a container's two shared files. No other file defines it.
 *
 * Only the agent writes `limits`; the container maps it read-only. It holds two copies and one selector, so that a
 * killed writer leaves either the old limits or the new limits. The container's processes share `usage`: accounts,
 * process slots, pacer state. Every multi-byte field is native-endian: the files never leave the machine and never
 * survive its boot (boot id in the header). */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H
#include <stdatomic.h>
#include <stdint.h>

#include "vgpu/agent.h"

#define VGPU_REGION_ABI 3u
#define VGPU_LIMITS_MAGIC 0x6c696d6975706776ull /* "vgpuimil" */
#define VGPU_USAGE_MAGIC 0x6567617375706776ull  /* "vgpusage" */
#define VGPU_SLOTS VGPU_MAX_PROCESSES
#define VGPU_LANES 16u /* per slot: number of operations that one process can have in flight */
#define VGPU_CACHE_LINE 64
#define VGPU_RUNS 64 /* busy intervals that a container remembers per card; power of two */

enum vgpu_account_index {
    VGPU_DEVICE_BYTES, /* all device memory that the container has allocated; tested against `memory` */
    VGPU_HOST_BYTES,   /* the part in host memory; tested against `host_memory` */
    /* the part really on the card; tested against guarantee + lent; kept only with VGPU_OVERSUBSCRIBE */
    VGPU_RESIDENT_BYTES,
    /* the part on the card that cannot move to host memory; tested against the guarantee, because lent memory may be
     * taken back */
    VGPU_FIXED_BYTES,
    VGPU_ACCOUNTS
};
#define VGPU_ACCOUNT_ROOM 4u /* array size: a power of two makes an index cheap */

struct vgpu_file_header {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;    /* of the whole file */
    char boot_id[40]; /* /proc/sys/kernel/random/boot_id */
    uint64_t reserved;
} __attribute__((aligned(VGPU_CACHE_LINE)));

struct vgpu_limits_file {
    struct vgpu_file_header header;
    /* even/odd chooses the copy; every change adds one, which readers notice */
    _Atomic uint64_t selector;
    struct vgpu_limits copies[2] __attribute__((aligned(VGPU_CACHE_LINE)));
    /* the arbiter and the agent publish this in place, per card */
    struct {
        _Atomic uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the last publication; 0: no arbiter */
        _Atomic uint32_t neighbours;   /* other containers that were active on the card in the last look */
        _Atomic uint32_t share;        /* elastic: percent that the container may use now */
        _Atomic uint32_t yield;        /* a high-priority container has work */
        uint32_t reserved;
        /* GPU time charged to this container while its neighbours had the card (their time slices in its measured
         * intervals); only ever grows. The process that launches next takes the new part back, see
         * vgpu_pacer_card.refund_taken. */
        _Atomic uint64_t refund_ns;
        /* bytes that the container may hold on the card above its guarantee; a container that holds more must move
         * memory away. See vgpu_lent_write. */
        _Atomic uint64_t lent;
    } arbiter[VGPU_MAX_CARDS] __attribute__((aligned(VGPU_CACHE_LINE)));
};

/* One account. One 128-bit compare-and-swap changes the word and names the operation (lane, seq) that changed it last.
 * Readers read the halves one by one; the compare-and-swap fails after a torn read. */
struct vgpu_word {
    _Atomic uint64_t used;
    _Atomic uint64_t tag; /* seq << 16 | lane number in the region (slot * VGPU_LANES + lane); 0: no operation yet */
} __attribute__((aligned(16)));

struct vgpu_account {
    struct vgpu_word word;
} __attribute__((aligned(VGPU_CACHE_LINE)));

/* What one lane does to one account; account.h has the order of the writes. seq and done survive the reuse of the
 * slot. */
struct vgpu_lane {
    _Atomic uint64_t bytes;  /* bytes that the lane holds */
    _Atomic uint64_t after;  /* bytes that the lane will hold after the operation under way */
    _Atomic uint64_t intent; /* seq << 1 | active */
    _Atomic uint64_t done;   /* largest seq that any process saw applied; only ever raised */
} __attribute__((aligned(VGPU_CACHE_LINE /
                         2))); /* a lane has one operation at a time, on any account, so two lanes may share a line */

enum vgpu_slot_state { VGPU_SLOT_FREE, VGPU_SLOT_CLAIMED, VGPU_SLOT_LIVE };
enum vgpu_slot_flag {
    /* the agent, not a process of the container; only the lock shows whether it lives, not a pid */
    VGPU_SLOT_AGENT = 1,
    /* exec replaced the program: only the lock, or VGPU_SLOT_KEPT, keeps the charges */
    VGPU_SLOT_REPLACED = 2,
    /* the next program inherited open device files, so the driver keeps the memory */
    VGPU_SLOT_KEPT = 4,
};

/* The holder of a slot; apart from the slots' large parts, so that a search touches little memory. */
struct vgpu_slot_head {
    /* generation << 2 | enum vgpu_slot_state; every taking of the slot raises the generation */
    _Atomic uint64_t owner;
    _Atomic uint64_t reaper; /* generation << 32 | slot of the reaper of this slot; 0: no reaper */
    _Atomic int32_t pid;     /* as the process itself sees it; 0: not yet known */
    _Atomic uint32_t flags;  /* enum vgpu_slot_flag */
    _Atomic uint64_t pid_namespace;
    _Atomic uint64_t start_time;
} __attribute__((aligned(VGPU_CACHE_LINE)));

#define VGPU_OWED_SETTLED 1u

struct vgpu_slot {
    /* without VGPU_KIND_BUFFER, which is the rest of what the lanes hold */
    _Atomic uint64_t by_kind[VGPU_MAX_CARDS][VGPU_KINDS];
    _Atomic uint64_t gpu_ns[VGPU_MAX_CARDS];
    _Atomic uint64_t throttled_ns[VGPU_MAX_CARDS];
    _Atomic uint64_t launches[VGPU_MAX_CARDS];
    struct vgpu_lane lanes[VGPU_LANES][VGPU_MAX_CARDS][VGPU_ACCOUNT_ROOM];
    /* Unknown launches under way, which are therefore unpaid: the process that reaps a dead process charges the time
     * since `since_ns`. Uses the free end of the last page: older regions have zeros here. */
    struct {
        /* CLOCK_MONOTONIC of the oldest such launch; 0: none. Odd: the launches have paid a mean (VGPU_OWED_SETTLED).
         */
        _Atomic uint64_t since_ns;
        _Atomic uint64_t paid_ns; /* GPU time charged to the process since then */
    } owed[VGPU_MAX_CARDS];
} __attribute__((aligned(4096)));

/* One measured busy interval of the container on a card, CLOCK_MONOTONIC ns. end_ns 0: the entry is being written, or
 * its writer was killed. */
struct vgpu_run {
    _Atomic uint64_t begin_ns, end_ns;
};

struct vgpu_pacer_card {
    _Atomic uint64_t tat; /* theoretical arrival time of GCRA, CLOCK_MONOTONIC ns */
    /* Latest known end of launched work: the start of the last launch, or the start that a waiting launch has reserved,
     * CLOCK_MONOTONIC ns; only ever raised. The container has work until VGPU_ACTIVE_NS after this time, so the work of
     * a killed process expires. */
    _Atomic uint64_t wanted_until;
    _Atomic uint64_t refund_taken; /* the part of the arbiter's refund_ns that has been applied to tat and gpu_ns */
    /* how far corrections have moved tat back in total, minus debits: waiting launches start earlier by as much */
    _Atomic uint64_t credited_ns;
    _Atomic uint32_t percent; /* share by which tat was last computed */
    _Atomic uint64_t gpu_ns;
    _Atomic uint64_t throttled_ns;
    _Atomic uint64_t launches;
    _Atomic uint64_t refused;
    /* Utilisation as NVML shows it: GPU time in the last whole window of about half a second. */
    _Atomic uint64_t window_start;  /* CLOCK_MONOTONIC ns of the window under way */
    _Atomic uint64_t window_gpu_ns; /* gpu_ns at its start */
    _Atomic uint64_t window_share;  /* in the window before: GPU ns per 1000 ns */
    /* Ring of the last measured launches of at least VGPU_LONG_RUN_NS. A writer takes number i = run_count++. It stores
     * end_ns = 0, begin_ns, then end_ns (release) into runs[i % VGPU_RUNS]. */
    _Atomic uint64_t run_count;
    struct vgpu_run runs[VGPU_RUNS];
} __attribute__((aligned(VGPU_CACHE_LINE)));

#define VGPU_ACTIVE_NS 30000000u /* see wanted_until */
/* from this length on, launches are measured one by one, pay their real time, and appear in runs */
#define VGPU_LONG_RUN_NS 500000u

/* Open-file-description locks on `usage`: byte i belongs to slot i. The lock is held as long as the slot's process
 * lives, or a child that inherited the lock. */
#define VGPU_LOCK_SLOT(i) (i)

struct vgpu_usage_file {
    struct vgpu_file_header header;
    _Atomic uint32_t slots_high; /* slots from this number on have never been taken */
    _Atomic uint32_t unhooked;   /* entry points that the driver offered and no hook covers */
    _Atomic uint32_t saturated;  /* releases of more bytes than were charged, cut to the charged bytes */
    /* Whether memory of a node of the host can be made; tried once. 0: not yet; HOST_WORKS or HOST_FAILS of
     * tier/memory.c; else 1 + the slot number of the process that tries. If that process has ended, the try ended it.
     * Uses a former gap. */
    _Atomic uint32_t host_tried;
    struct vgpu_account accounts[VGPU_MAX_CARDS][VGPU_ACCOUNT_ROOM];
    struct vgpu_pacer_card pacer[VGPU_MAX_CARDS];
    struct vgpu_slot_head heads[VGPU_SLOTS];
    struct vgpu_slot slots[VGPU_SLOTS]; /* sparse: only pages of taken slots exist */
};

_Static_assert(sizeof(struct vgpu_slot_head) == VGPU_CACHE_LINE && 2 * sizeof(struct vgpu_lane) == VGPU_CACHE_LINE,
               "whole cache lines");
_Static_assert(sizeof(struct vgpu_slot) == 36864, "the layout of this ABI");
_Static_assert((int)VGPU_ACCOUNTS <= (int)VGPU_ACCOUNT_ROOM, "room for all accounts");
_Static_assert(sizeof(struct vgpu_limits) % sizeof(uint64_t) == 0, "limits are copied word by word");
_Static_assert(VGPU_SLOTS *VGPU_LANES <= 1u << 16, "a lane number must fit into the tag of a word");
#endif
