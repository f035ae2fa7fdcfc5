/* The memory of the tier's blocks: makes and maps memory of a card, or of the host behind it. Only driver calls: the
 * caller handles charges and records, and relaxes the capture mode for these calls (capture.h). */
#ifndef VGPU_TIER_MEMORY_H
#define VGPU_TIER_MEMORY_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

/* Bytes rounded up to whole granules; 0: too many bytes. */
uint64_t vgpu_tier_rounded(uint64_t bytes);
/* The driver can map memory of this card by itself. */
bool vgpu_tier_maps_card(CUdevice device);
/* The driver can map memory of the host's NUMA node next to this card (CUDA 12.9 and newer say so); `node` is its
 * number. */
bool vgpu_tier_maps_host(CUdevice device, int *node);
/* The machine can spare that much memory: its available memory stays above a reserve of 1/20 of all memory, 256 MiB to
 * 4 GiB. True if /proc/meminfo cannot be read. */
bool vgpu_host_spares(uint64_t bytes);
/* The same for the text of /proc/meminfo. */
bool vgpu_meminfo_spares(const char *text, uint64_t bytes);

/* Makes memory of whole granules, on the card or in host memory behind it, not mapped yet. */
CUresult vgpu_tier_create(CUdevice device, bool on_device, uint64_t bytes, CUmemGenericAllocationHandle *handle);
/* From now on, contexts of `other` may access this card's memory (cuCtxEnablePeerAccess, cuMemPoolSetAccess), also
 * mapped memory. Holds as long as the process lives. */
void vgpu_tier_add_peer(CUdevice device, CUdevice other);
/* Whether contexts of `other` may access the memory of `device`. */
bool vgpu_tier_is_peer(CUdevice other, CUdevice device);
/* Maps all of the memory for the card, and for its peers. After a failure nothing is mapped, except with `lost`: then
 * the driver did not unmap, so neither the addresses nor the memory are free. */
CUresult vgpu_tier_map(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes,
                       CUmemGenericAllocationHandle handle, bool *lost);
/* Lets the card and its peers use mapped memory. */
CUresult vgpu_tier_give_access(CUdevice device, bool on_device, CUdeviceptr base, uint64_t bytes);
/* In a forked child: process.h. */
void vgpu_tier_peers_forget(void);
#endif
