/* Reads the share of a card that the container may use now. */
#define _GNU_SOURCE
#include "pacer/core_share.h"

#include "ledger/attach.h"
#include "loader/driver.h"

#define MS 1000000u
#define DEFAULT_BURST_MS 50u /* also covers late wake-ups and waiting behind a neighbour's long kernel */
/* Above the guaranteed share, little work may be under way when the owner returns; covers late wake-ups on a busy
 * machine. */
#define BORROWED_BURST_MS 20u
/* the card needs this to switch between containers: if it were lent too, work would queue up that cannot run */
#define CHANGES_PERCENT 1u
/* a low-priority container keeps this while a high-priority one works, so that it never stops completely */
#define YIELDING_PERCENT 2u
#define HEARTBEAT_NS 1000000000u /* after this silence the arbiter counts as dead */
#define MAX_DEVICES 64

bool vgpu_arbiter_lives(unsigned card, uint64_t now) {
    const struct vgpu_limits_file *file = vgpu_mapped.limits;
    uint64_t beat = file ? atomic_load_explicit(&file->arbiter[card].heartbeat_ns, memory_order_relaxed) : 0;
    return beat && (int64_t)(now - beat) < (int64_t)HEARTBEAT_NS;
}

/* Percent of the multiprocessors that MPS leaves to this process; 100 without MPS or without its limit. Asks the
 * driver, not the environment: a variable without effect must not end the pacing. */
static unsigned width_under_mps(CUdevice device) {
    int served = 0, all = 0;
    CUexecAffinityParam affinity;
    __typeof__(&cuDeviceGetAttribute) attribute = DRIVER(cuDeviceGetAttribute);
    __typeof__(&cuCtxGetExecAffinity) ask = DRIVER(cuCtxGetExecAffinity);
    if (!attribute || !ask || attribute(&served, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) != CUDA_SUCCESS || !served ||
        attribute(&all, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS || all <= 0 ||
        ask(&affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT) != CUDA_SUCCESS)
        return 100;
    unsigned width = affinity.param.smCount.val * 100 / (unsigned)all;
    return width < 100 ? width : 100;
}

/* True if MPS keeps the current context within `percent`. MPS rounds up to whole multiprocessors, which adds some
 * percent of a card at most. */
static bool kept_by_mps(const struct vgpu_place *place, uint32_t percent) {
    static struct {
        _Atomic(CUcontext) context;
        atomic_uint width;
    } known[MAX_DEVICES];
    if (place->device < 0 || place->device >= MAX_DEVICES)
        return false;
    if (atomic_load_explicit(&known[place->device].context, memory_order_acquire) != place->context) {
        atomic_store(&known[place->device].width, width_under_mps(place->device));
        atomic_store_explicit(&known[place->device].context, place->context, memory_order_release);
    }
    unsigned width = atomic_load_explicit(&known[place->device].width, memory_order_relaxed);
    return width < 100 && width <= percent + 3;
}

struct vgpu_pace vgpu_pace_now(const struct vgpu_limits *limits, const struct vgpu_place *place, uint64_t now) {
    const struct vgpu_card_limit *card = &limits->cards[place->card];
    const struct vgpu_limits_file *file = vgpu_mapped.limits;
    struct vgpu_pace share = {.burst_ns = (uint64_t)(limits->burst_ms ? limits->burst_ms : DEFAULT_BURST_MS) * MS};
    if (limits->core_policy == VGPU_CORES_NONE)
        return share;
    bool arbitrated = vgpu_arbiter_lives(place->card, now);
    uint32_t percent = card->cores;
    if (limits->core_policy == VGPU_CORES_ELASTIC) {
        uint32_t granted =
            arbitrated ? atomic_load_explicit(&file->arbiter[place->card].share, memory_order_relaxed) : 0;
        uint32_t ceiling = card->cores_ceiling ? card->cores_ceiling : 100;
        if (granted) {
            percent = granted < ceiling ? granted : ceiling;
            share.moves = true;
            if (percent > card->cores) {
                share.burst_ns = BORROWED_BURST_MS * MS;
                if (percent > CHANGES_PERCENT &&
                    atomic_load_explicit(&file->arbiter[place->card].neighbours, memory_order_relaxed))
                    percent -= CHANGES_PERCENT; /* not to 0, which is no limit */
            }
        } else if (!percent) {
            percent = card->cores_ceiling;
        }
    }
    /* A whole card needs no pacing, unless part of it is only lent: then little work may be under way. */
    if (percent >= 100)
        percent = share.moves && card->cores < 100 ? 100 : 0;
    if (limits->priority > 0 && arbitrated) {
        share.moves = true;
        if (atomic_load_explicit(&file->arbiter[place->card].yield, memory_order_relaxed)) {
            percent = percent && percent < YIELDING_PERCENT ? percent : YIELDING_PERCENT;
            share.burst_ns = 0;
        }
    }
    if (percent && percent < 100 && kept_by_mps(place, percent))
        percent = 0;
    share.percent = percent;
    return share;
}
