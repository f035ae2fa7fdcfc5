#define _GNU_SOURCE
#include "contention.h"

#include "driver.h"
#include "ledger.h"
#include "share.h"
#include "spin.h"

#define LOOK_NS 250000000u
#define LOOKS 4u                 /* NVML averages over up to a second: compare with our own last second */
#define LINGER_NS 2000000000u    /* the samples that remember a neighbour stay suspect for so long */
#define TOLERANCE_PERCENT 6

static struct look {
    uint64_t at, container_ns, process_ns;
} looks[VGPU_MAX_CARDS][LOOKS];

static struct {
    _Atomic uint64_t next_look;
    _Atomic uint64_t until; /* contended until then */
    _Atomic uint64_t neighboured_until;
    _Atomic int64_t own_ns;
    uint32_t count;         /* looks so far; only whoever holds `lock` */
} cards[VGPU_MAX_CARDS];

static vgpu_spin lock;

void vgpu_contention_own(unsigned card, int64_t gpu_ns) {
    atomic_fetch_add_explicit(&cards[card].own_ns, gpu_ns, memory_order_relaxed);
}

/* NVML's utilisation of the whole card in percent; -1: no answer (no NVML, a MIG slice). */
static int whole_card(unsigned card) {
    static atomic_int state; /* 1: NVML works, 2: it does not */
    const struct vgpu_limits *limits = vgpu_limits_now();
    nvmlDevice_t handle;
    nvmlUtilization_t rates;
    if (!limits || !DRIVER(nvmlInit_v2) || !DRIVER(nvmlDeviceGetUtilizationRates) || atomic_load(&state) == 2)
        return -1;
    if (!atomic_load(&state))
        atomic_store(&state, DRIVER(nvmlInit_v2)() == NVML_SUCCESS ? 1 : 2);
    const char *uuid = limits->cards[card].uuid;
    nvmlReturn_t found = NVML_ERROR_NOT_FOUND;
    if (uuid[0] && DRIVER(nvmlDeviceGetHandleByUUID))
        found = DRIVER(nvmlDeviceGetHandleByUUID)(uuid, &handle);
    else if (!uuid[0] && DRIVER(nvmlDeviceGetHandleByIndex_v2))
        found = DRIVER(nvmlDeviceGetHandleByIndex_v2)(card, &handle);
    return found == NVML_SUCCESS && DRIVER(nvmlDeviceGetUtilizationRates)(handle, &rates) == NVML_SUCCESS ? (int)rates.gpu : -1;
}

enum company { ALONE, SIBLINGS, NEIGHBOURS };

/* With the lock held: whom this look finds on the card. */
static enum company company_now(unsigned card, uint64_t now) {
    struct look *oldest = &looks[card][cards[card].count++ % LOOKS];
    struct look before = *oldest;
    uint64_t own = (uint64_t)atomic_load(&cards[card].own_ns);
    *oldest = (struct look){now, atomic_load(&vgpu_mapping()->usage->pacer[card].gpu_ns), own};
    if (!before.at || now <= before.at)
        return ALONE;
    int64_t span = (int64_t)(now - before.at);
    int64_t container = (int64_t)(oldest->container_ns - before.container_ns) * 100 / span;
    int64_t process = (int64_t)(own - before.process_ns) * 100 / span;
    enum company company = container - process > TOLERANCE_PERCENT ? SIBLINGS : ALONE;
    if (vgpu_arbiter_lives(card, now))
        return atomic_load_explicit(&vgpu_mapping()->limits->arbiter[card].neighbours, memory_order_relaxed) ? NEIGHBOURS : company;
    int whole = whole_card(card);
    /* More than ours: others run. Less than ours: we charge too much, which is what their time slices in our samples do. */
    return whole >= 0 && (whole - container > TOLERANCE_PERCENT || container - whole > TOLERANCE_PERCENT) ? NEIGHBOURS : company;
}

static void linger(_Atomic uint64_t *until, bool found, uint64_t now) {
    if (found)
        atomic_store_explicit(until, now + LINGER_NS, memory_order_relaxed);
    else if (now >= atomic_load_explicit(until, memory_order_relaxed))
        atomic_store_explicit(until, 0, memory_order_relaxed);
}

void vgpu_contention_update(unsigned card, uint64_t now) {
    uint64_t due = atomic_load_explicit(&cards[card].next_look, memory_order_relaxed);
    if (now < due || !vgpu_spin_try(&lock))
        return;
    atomic_store_explicit(&cards[card].next_look, now + LOOK_NS, memory_order_relaxed);
    enum company company = company_now(card, now);
    linger(&cards[card].until, company != ALONE, now);
    linger(&cards[card].neighboured_until, company == NEIGHBOURS, now);
    vgpu_spin_unlock(&lock);
}

bool vgpu_neighboured(unsigned card) {
    return atomic_load_explicit(&cards[card].neighboured_until, memory_order_relaxed) != 0;
}

bool vgpu_contended(unsigned card) {
    return atomic_load_explicit(&cards[card].until, memory_order_relaxed) != 0;
}
