/* What a container is told about the memory of a card. One place, so that every query agrees. */
#ifndef VGPU_REPORTED_MEMORY_H
#define VGPU_REPORTED_MEMORY_H
#include <stdint.h>

struct vgpu_reported_memory {
    /* the limit; not above the physical size, unless the limits allow more than that (oversubscription) */
    uint64_t total;
    uint64_t free; /* what is left of it; not above what the driver has free */
    uint64_t used; /* by the container */
};

/* For a card of the limits (or VGPU_CARD_UNLISTED: nothing), given the driver's own figures (UINT64_MAX: unknown). */
struct vgpu_reported_memory vgpu_reported_memory_of(unsigned card, uint64_t driver_total, uint64_t driver_free);
#endif
