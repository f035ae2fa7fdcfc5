/* Arrays (textures, surfaces): opaque memory whose size follows from the descriptor. */
#define _GNU_SOURCE
#include "hooks/sparse.h"
#include "ledger/charge.h"

/* Names that cuda.h has since CUDA 13. */
#define UINT16_SEMIPLANAR_444 0x58
#define UINT16_PLANAR_444 0x5e

/* cuMemCreate blocks provide the memory and are charged themselves */
#define NO_MEMORY_YET (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)

/* Bits of one element with one channel (cuda.h, CUarray_format). Block-compressed formats: per texel, all channels;
 * planar video: all planes. */
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
    /* 16 bits per channel, also for formats with 10 or 12 bits */
    case CU_AD_FORMAT_Y416: return 64;
    case CU_AD_FORMAT_Y444_PLANAR10:
    case CU_AD_FORMAT_YUV444_16bit_SemiPlanar:
    case UINT16_SEMIPLANAR_444:
    case UINT16_PLANAR_444: return 48;
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
    default: return 32; /* the largest of the remaining video formats; unknown future formats are charged like RGBA8 */
    }
}

static uint64_t level_bytes(uint64_t width, uint64_t height, uint64_t depth, unsigned channels, CUarray_format format) {
    bool whole;
    unsigned bits = format_bits(format, &whole);
    unsigned __int128 total = (unsigned __int128)width * (height ? height : 1) * (depth ? depth : 1) * bits *
                              (whole || !channels ? 1 : channels);
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

/* The hooks copy a descriptor before computing its bytes, and book a handle before the program sees it: another thread
 * of the program may write both. */
static CUresult array_made(struct vgpu_attempt *attempt, CUresult result, CUarray made, CUarray *array) {
    if (!vgpu_attempt_booked(attempt, result, VGPU_ARRAY, number(made), attempt->bytes, VGPU_KIND_ARRAY)) {
        if (DRIVER(cuArrayDestroy))
            DRIVER(cuArrayDestroy)(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *array = made;
    return result;
}

#define CREATE(bytes, flags)                                                                                           \
    if (!array || !given)                                                                                              \
        return real(array, given);                                                                                     \
    const __typeof__(*given) d = *given;                                                                               \
    struct vgpu_attempt attempt;                                                                                       \
    if (!vgpu_attempt_here(&attempt, bytes))                                                                           \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
    CUarray made = NULL;                                                                                               \
    CUresult result = real(&made, &d);                                                                                 \
    if (result == CUDA_SUCCESS && (flags) & CUDA_ARRAY3D_SPARSE)                                                       \
        vgpu_sparse_made(made);                                                                                        \
    return array_made(&attempt, result, made, array)

#define FLAT_BYTES level_bytes(d.Width, d.Height, 1, d.NumChannels, d.Format)
#define DEEP_BYTES (d.Flags & NO_MEMORY_YET ? 0 : level_bytes(d.Width, d.Height, d.Depth, d.NumChannels, d.Format))

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *given) {
    CUDA_REAL(cuArrayCreate_v2);
    CREATE(FLAT_BYTES, 0);
}

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *given) {
    CUDA_REAL(cuArrayCreate);
    CREATE(FLAT_BYTES, 0);
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *given) {
    CUDA_REAL(cuArray3DCreate_v2);
    CREATE(DEEP_BYTES, d.Flags);
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *given) {
    CUDA_REAL(cuArray3DCreate);
    CREATE(DEEP_BYTES, d.Flags);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *given, unsigned int levels) {
    CUDA_REAL(cuMipmappedArrayCreate);
    if (!array || !given)
        return real(array, given, levels);
    const CUDA_ARRAY3D_DESCRIPTOR d = *given;
    struct vgpu_attempt attempt;
    if (!vgpu_attempt_here(&attempt, d.Flags & NO_MEMORY_YET ? 0 : mipmap_bytes(&d, levels)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUmipmappedArray made = NULL;
    CUresult result = real(&made, &d, levels);
    if (result == CUDA_SUCCESS && d.Flags & CUDA_ARRAY3D_SPARSE)
        vgpu_sparse_made(made);
    if (!vgpu_attempt_booked(&attempt, result, VGPU_MIPMAP, number(made), attempt.bytes, VGPU_KIND_ARRAY)) {
        if (DRIVER(cuMipmappedArrayDestroy))
            DRIVER(cuMipmappedArrayDestroy)(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *array = made;
    return result;
}

CUresult cuArrayDestroy(CUarray array) {
    CUDA_REAL(cuArrayDestroy);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_ARRAY, number(array), &freeing);
    bool going = array && vgpu_sparse_going();
    CUresult result = real(array);
    vgpu_sparse_gone(going, result == CUDA_SUCCESS, array, NULL);
    return vgpu_freed(result, VGPU_ARRAY, number(array), known, &freeing);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    CUDA_REAL(cuMipmappedArrayDestroy);
    struct vgpu_freeing freeing;
    bool known = vgpu_freeing(VGPU_MIPMAP, number(array), &freeing);
    bool going = array && vgpu_sparse_going();
    CUresult result = real(array);
    vgpu_sparse_gone(going, result == CUDA_SUCCESS, array, NULL);
    return vgpu_freed(result, VGPU_MIPMAP, number(array), known, &freeing);
}
