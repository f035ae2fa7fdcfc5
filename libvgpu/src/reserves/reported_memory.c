/* Computes the total, free and used memory that queries report. */
#include "reserves/reported_memory.h"

#include <errno.h>

#include "ledger/cards.h"
#include "ledger/ledger.h"
#include "reserves/pools.h"

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

struct vgpu_reported_memory vgpu_reported_memory_of(unsigned card, uint64_t driver_total, uint64_t driver_free) {
    struct vgpu_reported_memory view = {0, 0, 0};
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits || card >= limits->card_count)
        return view;
    int kept = errno;
    vgpu_pools_settle(card);
    view.used = vgpu_used(card, VGPU_DEVICE_BYTES);
    errno = kept;
    uint64_t limit = limits->cards[card].memory;
    view.total = limits->flags & VGPU_OVERSUBSCRIBE && limit != VGPU_NO_LIMIT ? limit : smaller(limit, driver_total);
    view.free = view.total > view.used ? view.total - view.used : 0;
    if (!(limits->flags & VGPU_OVERSUBSCRIBE) || limit == VGPU_NO_LIMIT)
        view.free = smaller(view.free, driver_free);
    return view;
}
