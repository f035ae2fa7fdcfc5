/* Which entry of the limits belongs to a CUDA device or an NVML handle. CUDA_VISIBLE_DEVICES may number devices in any
 * order, so the UUID identifies a card. Entries without a UUID (limits from the environment) follow NVML's order. */
#ifndef VGPU_CARDS_H
#define VGPU_CARDS_H
#include <stdbool.h>

#include "loader/driver.h"

/* A card that the limits do not list: no memory may be allocated on it. */
#define VGPU_CARD_UNLISTED 255u

#define VGPU_NO_DEVICE (-1)
/* The device whose memory a location means; VGPU_NO_DEVICE: host memory. For an unknown kind of location, or none: the
 * device of the current context, else the first device. */
CUdevice vgpu_device_of_location(const CUmemLocation *location);
/* Whether the kind of location is known here, and a device number is possible. */
bool vgpu_location_is_known(const CUmemLocation *location);

/* Where a call of this thread would take effect. */
struct vgpu_place {
    CUcontext context;
    CUdevice device;
    unsigned card; /* index into the limits, or VGPU_CARD_UNLISTED */
};

/* Fills `place` from the current context; false: there is none, so the driver decides about the call. */
bool vgpu_place_now(struct vgpu_place *place);
/* The same for the context of a stream. */
bool vgpu_place_of_stream(CUstream stream, struct vgpu_place *place);
unsigned vgpu_card_of_device(CUdevice device);
unsigned vgpu_card_of_nvml(nvmlDevice_t device);
/* False: the driver does not know this device either, and will report that. */
bool vgpu_device_exists(CUdevice device);
/* Whether the device's primary context is active. */
bool vgpu_primary_is_active(CUdevice device);
/* Contexts have been destroyed: what threads remember of them is invalid. */
void vgpu_places_forget(void);
#endif
