/* Computes how much of one card each container may use now. */
#include "arbiter/arbiter.h"

/* what a low-priority container keeps while a high-priority one has work; as in pacer/core_share.c */
#define FLOOR_PERCENT 2u

static uint32_t at_most(uint32_t value, uint32_t most) {
    return value < most ? value : most;
}

/* The most that a container may ever use. */
static uint32_t ceiling_of(const struct vgpu_arbiter_view *view) {
    if (view->policy == VGPU_CORES_ELASTIC) {
        const uint32_t ceiling = view->ceiling ? at_most(view->ceiling, 100) : 100;
        return ceiling > view->cores ? ceiling : at_most(view->cores, 100);
    }
    return view->policy == VGPU_CORES_FIXED && view->cores ? at_most(view->cores, 100) : 100;
}

/* What a container would use if it could; `eager`: as if it wanted all that it may have. */
static uint32_t appetite(const struct vgpu_arbiter_view *view, bool eager) {
    const uint32_t ceiling = ceiling_of(view);
    const uint32_t wanted = eager || view->demand > 100 ? ceiling : at_most(ceiling, view->demand ? view->demand : 1);
    return view->yield ? at_most(wanted, FLOOR_PERCENT) : wanted;
}

/* Shares of the containers with work, and of `one` in any case: first the guarantees, then the rest by weight. */
static void divide(const struct vgpu_arbiter_view *views, uint32_t count, uint32_t one, double shares[]) {
    double left = 100;
    for (uint32_t i = 0; i < count; i++) {
        const bool counts = views[i].active || i == one;
        shares[i] = counts ? at_most(views[i].cores, appetite(&views[i], i == one)) : 0;
        left -= shares[i];
    }
    while (left > 1e-6) {
        double weights = 0, given = 0;
        for (uint32_t i = 0; i < count; i++)
            if ((views[i].active || i == one) && shares[i] < appetite(&views[i], i == one))
                weights += views[i].cores ? views[i].cores : 1;
        if (weights == 0)
            return;
        for (uint32_t i = 0; i < count; i++) {
            const double room = appetite(&views[i], i == one) - shares[i];
            if (!(views[i].active || i == one) || room <= 0)
                continue;
            const double part = left * (views[i].cores ? views[i].cores : 1) / weights;
            const double more = part < room ? part : room;
            shares[i] += more;
            given += more;
        }
        left -= given;
    }
}

void vgpu_arbiter_shares(struct vgpu_arbiter_view *views, uint32_t count) {
    double shares[VGPU_ARBITER_MEMBERS];
    uint32_t active = 0, high = 0;
    count = at_most(count, VGPU_ARBITER_MEMBERS);
    for (uint32_t i = 0; i < count; i++) {
        active += views[i].active != 0;
        high += views[i].active && views[i].priority == 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        views[i].neighbours = active - (views[i].active != 0);
        views[i].yield = views[i].priority != 0 && high > 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        divide(views, count, i, shares);
        const uint32_t share = (uint32_t)(shares[i] + 1e-6);
        views[i].share = share ? share : 1;
    }
}
