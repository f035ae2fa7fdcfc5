/* The memory of a card as a container sees it. One place, so that every query agrees. */
#ifndef VGPU_REPORTED_MEMORY_H
#define VGPU_REPORTED_MEMORY_H
#include <stdint.h>

struct vgpu_reported_memory {
    /* the limit; not above the physical size, unless the limits allow oversubscription */
    uint64_t total;
    uint64_t free; /* what is left of the limit; not above the driver's free memory */
    uint64_t used; /* by the container */
};

/* For a card of the limits (VGPU_CARD_UNLISTED: no memory), given the driver's own figures (UINT64_MAX: unknown). */
struct vgpu_reported_memory vgpu_reported_memory_of(unsigned card, uint64_t driver_total, uint64_t driver_free);
#endif
