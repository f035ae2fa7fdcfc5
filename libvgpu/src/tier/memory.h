/* What blocks of the tier are made of: memory of a card, or of the host behind it, and its mapping. Calls of the driver
 * alone: charges and records are the caller's, who also relaxes the rules of captures for them (capture.h). */
#ifndef VGPU_TIER_MEMORY_H
#define VGPU_TIER_MEMORY_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* Whole granules for so many bytes; 0: more than there can be. */
uint64_t vgpu_tier_rounded(uint64_t bytes);
/* The driver can map memory of this card by itself. */
bool vgpu_tier_maps_card(CUdevice device);
/* The driver can map memory of the host's node next to this card (CUDA 12.9 and newer say so); `node` is its number. */
bool vgpu_tier_maps_host(CUdevice device, int *node);
/* The machine can spare so much of its memory: what it says to have available stays above a reserve of 1/20 of all, 256
 * MiB to 4 GiB. True where nothing can be read. */
bool vgpu_host_spares(uint64_t bytes);
/* The same for the text of /proc/meminfo. */
bool vgpu_meminfo_spares(const char *text, uint64_t bytes);

/* Memory of whole granules, on the card or in host memory behind it, that nothing is mapped to yet. */
CUresult vgpu_tier_create(CUdevice device, bool on_device, uint64_t bytes, CUmemGenericAllocationHandle *handle);
/* Contexts of `other` may reach what is on the card from now on (cuCtxEnablePeerAccess, cuMemPoolSetAccess), also where
 * it is mapped. For as long as the process lives. */
void vgpu_tier_add_peer(CUdevice device, CUdevice other);
/* Whether contexts of `other` may. */
bool vgpu_tier_is_peer(CUdevice other, CUdevice device);
/* Maps all of it for the card, and for the others that may reach it. After a failure nothing is mapped, unless
 * `lost`: the driver has not unmapped it, so that neither the addresses nor the memory are free. */
CUresult vgpu_tier_map(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes,
                       CUmemGenericAllocationHandle handle, bool *lost);
/* Lets the card, and others that may reach it, use what is mapped. */
CUresult vgpu_tier_give_access(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes);
/* In a forked child: process.h. */
void vgpu_tier_peers_forget(void);
#endif
