/* Which entry of the limits belongs to a CUDA device or an NVML handle. CUDA_VISIBLE_DEVICES may number devices in any
 * order, so cards are told apart by UUID; entries without a UUID (limits from the environment) mean NVML's order. */
#ifndef VGPU_CARDS_H
#define VGPU_CARDS_H
#include <stdbool.h>

#include "loader/driver.h"

/* A card that the limits do not list: nothing may be allocated on it. */
#define VGPU_CARD_UNLISTED 255u

#define VGPU_NO_DEVICE (-1)
/* The device whose memory a location means; VGPU_NO_DEVICE: memory of the host. Of a kind of location that is not known
 * here, or of none at all, the device of the current context, and the first one where there is none. */
CUdevice vgpu_device_of_location(const CUmemLocation *location);
/* Of a kind that is known here, and a device's with a number that a device can have. */
bool vgpu_location_is_known(const CUmemLocation *location);

/* Where a call of this thread would act. */
struct vgpu_place {
    CUcontext context;
    CUdevice device;
    unsigned card; /* index into the limits, or VGPU_CARD_UNLISTED */
};

/* Fills `place` from the current context; false: there is none, the driver decides about the call. */
bool vgpu_place_now(struct vgpu_place *place);
/* The same for the context of a stream. */
bool vgpu_place_of_stream(CUstream stream, struct vgpu_place *place);
unsigned vgpu_card_of_device(CUdevice device);
unsigned vgpu_card_of_nvml(nvmlDevice_t device);
/* False: the driver does not know this device either, and will say so. */
bool vgpu_device_exists(CUdevice device);
/* The device's primary context is there. */
bool vgpu_primary_is_active(CUdevice device);
/* Contexts have gone: what threads remember about them is void. */
void vgpu_places_forget(void);
#endif
