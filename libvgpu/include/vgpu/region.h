/* The layout of a container's two shared files. This is the only place that knows it.
 *
 * `limits` is written by the agent alone and mapped read-only in the container: two copies behind one selector, so that a killed writer
 * leaves either the old limits or the new ones. `usage` is shared by the container's processes: accounts, process slots, pacer state.
 * Every multi-byte field is native-endian; the files never leave the machine nor survive its boot (boot id in the header).
 */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H
#include <stdatomic.h>
#include <stdint.h>

#include "vgpu/agent.h"

#define VGPU_REGION_ABI 1u
#define VGPU_LIMITS_MAGIC 0x6c696d6975706776ull /* "vgpuimil" */
#define VGPU_USAGE_MAGIC 0x6567617375706776ull  /* "vgpusage" */
#define VGPU_SLOTS VGPU_MAX_PROCESSES
#define VGPU_LANES 16u        /* per slot: operations that one process has in flight at once */
#define VGPU_CACHE_LINE 64

enum vgpu_account_index { VGPU_DEVICE_BYTES, VGPU_HOST_BYTES, VGPU_ACCOUNTS };

struct vgpu_file_header {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;            /* of the whole file */
    char boot_id[40];         /* /proc/sys/kernel/random/boot_id */
    uint64_t reserved;
} __attribute__((aligned(VGPU_CACHE_LINE)));

struct vgpu_limits_file {
    struct vgpu_file_header header;
    _Atomic uint64_t selector; /* even/odd chooses the copy; grows by one with every change: readers compare it to notice changes */
    struct vgpu_limits copies[2] __attribute__((aligned(VGPU_CACHE_LINE)));
    /* what the arbiter publishes, per card, in place */
    struct {
        _Atomic uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the last publication; 0: no arbiter */
        _Atomic uint32_t neighbours;   /* other containers that were active on the card in the last period */
        _Atomic uint32_t share;        /* elastic: percent that this container may use now */
        _Atomic uint32_t yield;        /* a high-priority container has work */
        uint32_t reserved;
    } arbiter[VGPU_MAX_CARDS] __attribute__((aligned(VGPU_CACHE_LINE)));
};

/* One account. The word moves by one 128-bit compare-and-swap that also names the operation (lane, seq) which moved it last. */
struct vgpu_account {
    unsigned __int128 word;    /* used: bits 0-63, lane: bits 64-79, seq: bits 80-127 */
} __attribute__((aligned(VGPU_CACHE_LINE)));

struct vgpu_charge {
    uint64_t bytes;
    uint64_t seq;
} __attribute__((aligned(16)));

/* What one lane does to one account: see ledger.c for the order in which these are written. */
struct vgpu_lane {
    struct vgpu_charge charge;
    _Atomic uint64_t intent;   /* seq << 1 | active */
    _Atomic int64_t delta;
    _Atomic uint64_t done;     /* largest seq that anybody saw applied; only ever raised; survives reuse of the slot, as seq does */
    uint64_t reserved;
} __attribute__((aligned(VGPU_CACHE_LINE)));

struct vgpu_slot {
    _Atomic uint64_t owner;    /* generation << 2 | state (free, claimed, live, reaping) */
    _Atomic uint64_t reaper;   /* slot << 32 | generation of who reaps it; 0: nobody */
    _Atomic int32_t pid;
    uint32_t reserved;
    _Atomic uint64_t pid_namespace;
    _Atomic uint64_t start_time;
    _Atomic uint64_t by_kind[VGPU_MAX_CARDS][VGPU_KINDS];
    _Atomic uint64_t gpu_ns[VGPU_MAX_CARDS];
    struct vgpu_lane lanes[VGPU_LANES][VGPU_MAX_CARDS][VGPU_ACCOUNTS];
} __attribute__((aligned(4096)));

struct vgpu_pacer_card {
    _Atomic uint64_t tat;          /* theoretical arrival time of GCRA, CLOCK_MONOTONIC ns */
    _Atomic uint64_t gpu_ns;
    _Atomic uint64_t throttled_ns;
    _Atomic uint64_t launches;
    _Atomic uint64_t refused;
} __attribute__((aligned(VGPU_CACHE_LINE)));

/* Byte offsets for open-file-description locks on `usage`: one byte per slot, one for first initialisation. */
#define VGPU_LOCK_INIT 0
#define VGPU_LOCK_SLOT(i) (1 + (i))

struct vgpu_usage_file {
    struct vgpu_file_header header;
    _Atomic uint32_t unhooked;
    struct vgpu_account accounts[VGPU_MAX_CARDS][VGPU_ACCOUNTS];
    struct vgpu_pacer_card pacer[VGPU_MAX_CARDS];
    struct vgpu_slot slots[VGPU_SLOTS];
};
#endif
