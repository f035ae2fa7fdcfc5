/* The layout of a container's two shared files. This is the only place that knows it.
 *
 * `limits` is written by the agent alone and mapped read-only in the container: two copies behind one selector, so that
 * a killed writer leaves either the old limits or the new ones. `usage` is shared by the container's processes:
 * accounts, process slots, pacer state. Every multi-byte field is native-endian; the files never leave the machine nor
 * survive its boot (boot id in the header).
 */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H
#include <stdatomic.h>
#include <stdint.h>

#include "vgpu/agent.h"

#define VGPU_REGION_ABI 3u
#define VGPU_LIMITS_MAGIC 0x6c696d6975706776ull /* "vgpuimil" */
#define VGPU_USAGE_MAGIC 0x6567617375706776ull  /* "vgpusage" */
#define VGPU_SLOTS VGPU_MAX_PROCESSES
#define VGPU_LANES 16u /* per slot: operations that one process has in flight at once */
#define VGPU_CACHE_LINE 64
#define VGPU_RUNS 64 /* busy intervals that a container remembers per card; power of two */

enum vgpu_account_index {
    VGPU_DEVICE_BYTES, /* all that the container has allocated as memory of the card; tested against `memory` */
    VGPU_HOST_BYTES,   /* the part of it that lies in host memory; tested against `host_memory` */
    /* the part that is really on the card; tested against guarantee + lent; kept where VGPU_OVERSUBSCRIBE is set
     * alone */
    VGPU_RESIDENT_BYTES,
    /* the part of that which cannot move to host memory; tested against the guarantee: what is lent may be taken
     * back */
    VGPU_FIXED_BYTES,
    VGPU_ACCOUNTS
};
#define VGPU_ACCOUNT_ROOM 4u /* of arrays: a power of two, which makes an index cheap */

struct vgpu_file_header {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;    /* of the whole file */
    char boot_id[40]; /* /proc/sys/kernel/random/boot_id */
    uint64_t reserved;
} __attribute__((aligned(VGPU_CACHE_LINE)));

struct vgpu_limits_file {
    struct vgpu_file_header header;
    /* even/odd chooses the copy; grows by one with every change: readers compare it to notice changes */
    _Atomic uint64_t selector;
    struct vgpu_limits copies[2] __attribute__((aligned(VGPU_CACHE_LINE)));
    /* what the arbiter and the agent publish, per card, in place */
    struct {
        _Atomic uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the last publication; 0: no arbiter */
        _Atomic uint32_t neighbours;   /* other containers that were active on the card in the last period */
        _Atomic uint32_t share;        /* elastic: percent that this container may use now */
        _Atomic uint32_t yield;        /* a high-priority container has work */
        uint32_t reserved;
        /* cumulative GPU time that this container was charged while its neighbours had the card (time slices in its
         * measured intervals); whoever launches next takes what is new back, see vgpu_pacer_card.refund_taken */
        _Atomic uint64_t refund_ns;
        /* what the container may hold on the card above its guarantee; less than it holds means that it has to give
         * way. See vgpu_lent_write */
        _Atomic uint64_t lent;
    } arbiter[VGPU_MAX_CARDS] __attribute__((aligned(VGPU_CACHE_LINE)));
};

/* One account. The word moves by one 128-bit compare-and-swap that also names the operation (lane, seq) which moved it
 * last. The halves are read one by one: what a torn reading would do wrong, the compare-and-swap notices. */
struct vgpu_word {
    _Atomic uint64_t used;
    _Atomic uint64_t tag; /* seq << 16 | lane number in the region (slot * VGPU_LANES + lane); 0: nobody yet */
} __attribute__((aligned(16)));

struct vgpu_account {
    struct vgpu_word word;
} __attribute__((aligned(VGPU_CACHE_LINE)));

/* What one lane does to one account: see account.c for the order in which these are written. seq and done survive reuse
 * of the slot. */
struct vgpu_lane {
    _Atomic uint64_t bytes;  /* what the lane holds */
    _Atomic uint64_t after;  /* what it will hold when the operation under way has been applied */
    _Atomic uint64_t intent; /* seq << 1 | active */
    _Atomic uint64_t done;   /* largest seq that anybody saw applied; only ever raised */
} __attribute__((
    aligned(VGPU_CACHE_LINE /
            2))); /* one operation at a time concerns a lane, whichever account it is on: two may share a line */

enum vgpu_slot_state { VGPU_SLOT_FREE, VGPU_SLOT_CLAIMED, VGPU_SLOT_LIVE };
enum vgpu_slot_flag {
    /* not a process of the container; no pid to look at: the lock alone tells whether it lives */
    VGPU_SLOT_AGENT = 1,
    /* the process went on with another program (exec): only the lock, or VGPU_SLOT_KEPT, keeps the charges */
    VGPU_SLOT_REPLACED = 2,
    /* the next program inherited open device files, through which the driver keeps the memory */
    VGPU_SLOT_KEPT = 4,
};

/* Who holds a slot; dense and apart from the slots' large parts, so that a search touches little memory. */
struct vgpu_slot_head {
    _Atomic uint64_t owner;  /* generation << 2 | enum vgpu_slot_state; the generation grows with every taking */
    _Atomic uint64_t reaper; /* generation << 32 | slot of who reaps this one; 0: nobody */
    _Atomic int32_t pid;     /* as its process sees it; 0: not yet known */
    _Atomic uint32_t flags;  /* enum vgpu_slot_flag */
    _Atomic uint64_t pid_namespace;
    _Atomic uint64_t start_time;
} __attribute__((aligned(VGPU_CACHE_LINE)));

#define VGPU_OWED_SETTLED 1u

struct vgpu_slot {
    _Atomic uint64_t by_kind[VGPU_MAX_CARDS][VGPU_KINDS]; /* but VGPU_KIND_BUFFER: the rest of what the lanes hold */
    _Atomic uint64_t gpu_ns[VGPU_MAX_CARDS];
    _Atomic uint64_t throttled_ns[VGPU_MAX_CARDS];
    _Atomic uint64_t launches[VGPU_MAX_CARDS];
    struct vgpu_lane lanes[VGPU_LANES][VGPU_MAX_CARDS][VGPU_ACCOUNT_ROOM];
    /* Launches under way of which nothing is known, so that they have not been paid: whoever reaps a dead process
     * charges the time from `since` on. In what was left of the last page: regions of before have zeros here. */
    struct {
        /* CLOCK_MONOTONIC of the oldest; 0: there are none. Odd: of launches that have paid a mean
         * (VGPU_OWED_SETTLED) */
        _Atomic uint64_t since_ns;
        _Atomic uint64_t paid_ns; /* GPU time that the process has been charged since */
    } owed[VGPU_MAX_CARDS];
} __attribute__((aligned(4096)));

/* One measured busy interval of the container on a card, CLOCK_MONOTONIC ns. end_ns 0: being written, or its writer was
 * killed. */
struct vgpu_run {
    _Atomic uint64_t begin_ns, end_ns;
};

struct vgpu_pacer_card {
    _Atomic uint64_t tat; /* theoretical arrival time of GCRA, CLOCK_MONOTONIC ns */
    /* The latest end of what was launched, as far as it is known: start of the last launch, or the start that a waiting
     * one has reserved, CLOCK_MONOTONIC ns; only ever raised. The container has work as long as this is not more than
     * VGPU_ACTIVE_NS ago: it expires, whoever was killed. */
    _Atomic uint64_t wanted_until;
    _Atomic uint64_t refund_taken; /* how much of the arbiter's refund_ns has been applied to tat and gpu_ns */
    /* by how much corrections have brought tat forward in all, less debits: launches that wait follow it */
    _Atomic uint64_t credited_ns;
    _Atomic uint32_t percent; /* share that tat was last reckoned at */
    _Atomic uint64_t gpu_ns;
    _Atomic uint64_t throttled_ns;
    _Atomic uint64_t launches;
    _Atomic uint64_t refused;
    /* utilisation as NVML shows it: GPU time of the last whole window of about half a second */
    _Atomic uint64_t window_start;  /* CLOCK_MONOTONIC ns of the window under way */
    _Atomic uint64_t window_gpu_ns; /* gpu_ns at its start */
    _Atomic uint64_t window_share;  /* of the window before it: GPU ns per 1000 ns */
    /* Ring of the last measured launches of VGPU_LONG_RUN_NS and more. A writer takes number i = run_count++, stores
     * end_ns = 0, begin_ns, then end_ns (release) into runs[i % VGPU_RUNS]. */
    _Atomic uint64_t run_count;
    struct vgpu_run runs[VGPU_RUNS];
} __attribute__((aligned(VGPU_CACHE_LINE)));

#define VGPU_ACTIVE_NS 30000000u /* see wanted_until */
/* launches from here on are measured one by one, pay what they took, and appear in runs */
#define VGPU_LONG_RUN_NS 500000u

/* Open-file-description locks on `usage`: byte i belongs to slot i and is held as long as its process, or a child that
 * inherited it, lives. */
#define VGPU_LOCK_SLOT(i) (i)

struct vgpu_usage_file {
    struct vgpu_file_header header;
    _Atomic uint32_t slots_high; /* slots at and above this number have never been taken */
    _Atomic uint32_t unhooked;   /* entry points that the driver answered and no hook covers */
    _Atomic uint32_t saturated;  /* releases of more than was charged, cut to what was there */
    /* Whether memory of a node of the host can be made, tried once: 0 not yet, VGPU_HOST_WORKS, VGPU_HOST_FAILS, else
     * the number of the slot whose process tries, + 1; if that has ended, it ended in trying. In what was a gap. */
    _Atomic uint32_t host_tried;
    struct vgpu_account accounts[VGPU_MAX_CARDS][VGPU_ACCOUNT_ROOM];
    struct vgpu_pacer_card pacer[VGPU_MAX_CARDS];
    struct vgpu_slot_head heads[VGPU_SLOTS];
    struct vgpu_slot slots[VGPU_SLOTS]; /* sparse: only pages of taken slots ever exist */
};

_Static_assert(sizeof(struct vgpu_slot_head) == VGPU_CACHE_LINE && 2 * sizeof(struct vgpu_lane) == VGPU_CACHE_LINE,
               "whole cache lines");
_Static_assert(sizeof(struct vgpu_slot) == 36864, "the layout of this ABI");
_Static_assert((int)VGPU_ACCOUNTS <= (int)VGPU_ACCOUNT_ROOM, "room for all accounts");
_Static_assert(sizeof(struct vgpu_limits) % sizeof(uint64_t) == 0, "limits are copied word by word");
_Static_assert(VGPU_SLOTS *VGPU_LANES <= 1u << 16, "a lane number must fit into the tag of a word");
#endif
