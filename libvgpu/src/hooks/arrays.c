/* Arrays (textures, surfaces): opaque memory whose size follows from the descriptor. */
#define _GNU_SOURCE
#include "charge.h"

#define NO_MEMORY_YET (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) /* backed by cuMemCreate blocks, charged there */

/* Bits of one element with one channel (cuda.h, CUarray_format). Block-compressed formats: per texel, all channels; planar video: all planes. */
static unsigned format_bits(CUarray_format format, bool *whole_texel) {
    unsigned number = (unsigned)format;
    *whole_texel = false;
    if (number == CU_AD_FORMAT_UNSIGNED_INT8 || number == CU_AD_FORMAT_SIGNED_INT8)
        return 8;
    if (number == CU_AD_FORMAT_UNSIGNED_INT16 || number == CU_AD_FORMAT_SIGNED_INT16 || number == CU_AD_FORMAT_HALF)
        return 16;
    if (number == CU_AD_FORMAT_UNSIGNED_INT32 || number == CU_AD_FORMAT_SIGNED_INT32 || number == CU_AD_FORMAT_FLOAT)
        return 32;
    *whole_texel = true;
    switch (number) {
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM: return 4;
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB: return 8;
    case CU_AD_FORMAT_NV12: return 12;
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1: return 8;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1: return 16;
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2: return 32;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4: return 64;
    default: return 32; /* the largest of the remaining video formats; a format of the future is charged like RGBA8 */
    }
}

static uint64_t level_bytes(uint64_t width, uint64_t height, uint64_t depth, unsigned channels, CUarray_format format) {
    bool whole;
    unsigned bits = format_bits(format, &whole);
    unsigned __int128 total = (unsigned __int128)width * (height ? height : 1) * (depth ? depth : 1) * bits * (whole || !channels ? 1 : channels);
    total = (total + 7) / 8;
    return total > UINT64_MAX ? UINT64_MAX : (uint64_t)total;
}

static uint64_t mipmap_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels) {
    bool layered = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP); /* layers do not shrink */
    uint64_t width = d->Width, height = d->Height, depth = d->Depth, total = 0;
    for (unsigned level = 0; level < (levels ? levels : 1) && level < 64; level++) {
        uint64_t bytes = level_bytes(width, height, depth, d->NumChannels, d->Format);
        if (__builtin_add_overflow(total, bytes, &total))
            return UINT64_MAX;
        if (width <= 1 && height <= 1 && (depth <= 1 || layered))
            break; /* cuda.h: the number of levels is clamped to what the longest side allows */
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        depth = depth > 1 && !layered ? depth / 2 : depth;
    }
    return total;
}

static uint64_t number(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

static CUresult array_made(struct vgpu_attempt *attempt, CUresult result, const CUarray *array) {
    if (vgpu_attempt_booked(attempt, result, VGPU_ARRAY, number(result == CUDA_SUCCESS && array ? *array : NULL), attempt->bytes, VGPU_KIND_ARRAY))
        return result;
    if (DRIVER(cuArrayDestroy))
        DRIVER(cuArrayDestroy)(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    CUDA_REAL(cuArrayCreate_v2);
    struct vgpu_attempt attempt;
    return vgpu_attempt_here(&attempt, array && d ? level_bytes(d->Width, d->Height, 1, d->NumChannels, d->Format) : 0)
               ? array_made(&attempt, real(array, d), array)
               : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
    CUDA_REAL(cuArrayCreate);
    struct vgpu_attempt attempt;
    return vgpu_attempt_here(&attempt, array && d ? level_bytes(d->Width, d->Height, 1, d->NumChannels, d->Format) : 0)
               ? array_made(&attempt, real(array, d), array)
               : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    CUDA_REAL(cuArray3DCreate_v2);
    bool sized = array && d && !(d->Flags & NO_MEMORY_YET);
    struct vgpu_attempt attempt;
    return vgpu_attempt_here(&attempt, sized ? level_bytes(d->Width, d->Height, d->Depth, d->NumChannels, d->Format) : 0)
               ? array_made(&attempt, real(array, d), array)
               : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
    CUDA_REAL(cuArray3DCreate);
    bool sized = array && d && !(d->Flags & NO_MEMORY_YET);
    struct vgpu_attempt attempt;
    return vgpu_attempt_here(&attempt, sized ? level_bytes(d->Width, d->Height, d->Depth, d->NumChannels, d->Format) : 0)
               ? array_made(&attempt, real(array, d), array)
               : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    CUDA_REAL(cuMipmappedArrayCreate);
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, array && d && !(d->Flags & NO_MEMORY_YET) ? mipmap_bytes(d, levels) : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(array, d, levels);
    if (vgpu_attempt_booked(&attempt, result, VGPU_MIPMAP, number(result == CUDA_SUCCESS && array ? *array : NULL), attempt.bytes, VGPU_KIND_ARRAY))
        return result;
    if (DRIVER(cuMipmappedArrayDestroy))
        DRIVER(cuMipmappedArrayDestroy)(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArrayDestroy(CUarray array) {
    CUDA_REAL(cuArrayDestroy);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_ARRAY, number(array), &freeing);
    return vgpu_freed(real(array), VGPU_ARRAY, number(array), known, &freeing);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    CUDA_REAL(cuMipmappedArrayDestroy);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_MIPMAP, number(array), &freeing);
    return vgpu_freed(real(array), VGPU_MIPMAP, number(array), known, &freeing);
}
