/* Arrays: opaque memory with a format. Rows have no padding; the card is charged for the bytes of the elements. */
#include <sys/mman.h>

#include "cuda/driver.h"

/* depth counts layers or faces, which do not shrink from level to level */
#define LAYERS (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)
/* memory from cuMemCreate is mapped in later */
#define NO_MEMORY_YET (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)

static unsigned element_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4;
    default: return 0;
    }
}

/* Fills in what follows from a descriptor. From level to level of a mipmapped array, every dimension is halved. */
static CUresult describe(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array) {
    unsigned element = element_bytes(descriptor->Format);
    size_t rows = descriptor->Height ? descriptor->Height : 1, depth = descriptor->Depth ? descriptor->Depth : 1;
    if (!descriptor->Width || !element ||
        (descriptor->NumChannels != 1 && descriptor->NumChannels != 2 && descriptor->NumChannels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    if (__builtin_mul_overflow(descriptor->Width, (size_t)element * descriptor->NumChannels, &array->pitch) ||
        __builtin_mul_overflow(array->pitch, rows, &array->bytes) ||
        __builtin_mul_overflow(array->bytes, depth, &array->bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (descriptor->Flags & NO_MEMORY_YET)
        array->bytes = 0;
    array->descriptor = *descriptor;
    array->rows = rows;
    return CUDA_SUCCESS;
}

CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor) {
    ENTER_CONTEXT(context);
    struct CUarray_st wanted = {.context = context};
    if (!out || !descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = describe(descriptor, &wanted);
    if (!result)
        result = capture_forbids(NULL);
    if (!result)
        result = charge(context->card, wanted.bytes);
    if (result)
        return result;
    CUarray array = object_new(OBJECT_ARRAY);
    if (!array) {
        uncharge(context->card, wanted.bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    wanted.object = array->object;
    *array = wanted;
    *out = array;
    return CUDA_SUCCESS;
}

CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *descriptor) {
    ENTER();
    if (!out || !descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    return cuArray3DCreate_v2(out, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = descriptor->Width,
                                                              .Height = descriptor->Height,
                                                              .Format = descriptor->Format,
                                                              .NumChannels = descriptor->NumChannels});
}

CUresult cuArrayDestroy(CUarray array) {
    ENTER();
    if (!object_is(array, OBJECT_ARRAY) || array->level)
        return CUDA_ERROR_INVALID_HANDLE;
    if (array->contents)
        munmap(array->contents, array->bytes);
    uncharge(array->context->card, array->bytes);
    object_free(array);
    return CUDA_SUCCESS;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array) {
    ENTER();
    if (!descriptor || !object_is(array, OBJECT_ARRAY))
        return !descriptor ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *descriptor = array->descriptor;
    return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array) {
    ENTER();
    if (!descriptor || !object_is(array, OBJECT_ARRAY))
        return !descriptor ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *descriptor = (CUDA_ARRAY_DESCRIPTOR){.Width = array->descriptor.Width,
                                          .Height = array->descriptor.Height,
                                          .Format = array->descriptor.Format,
                                          .NumChannels = array->descriptor.NumChannels};
    return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUarray array, CUdevice device) {
    ENTER_DEVICE(device);
    if (!requirements || !object_is(array, OBJECT_ARRAY))
        return !requirements ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *requirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array->bytes, .alignment = 512};
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels) {
    ENTER_CONTEXT(context);
    if (!out || !descriptor || !levels)
        return CUDA_ERROR_INVALID_VALUE;
    size_t longest = descriptor->Width > descriptor->Height ? descriptor->Width : descriptor->Height;
    longest = descriptor->Depth > longest && !(descriptor->Flags & LAYERS) ? descriptor->Depth : longest;
    if (levels > (longest ? 64 - (unsigned)__builtin_clzll(longest) : 1))
        levels = longest ? 64 - (unsigned)__builtin_clzll(longest)
                         : 1; /* cuda.h: clamped to 1 + floor(log2(longest side)) */
    CUresult result = capture_forbids(NULL);
    if (result)
        return result;
    CUmipmappedArray mipmap = object_new(OBJECT_MIPMAP);
    if (!mipmap)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUDA_ARRAY3D_DESCRIPTOR level = *descriptor;
    mipmap->context = context;
    while (!result && mipmap->count < levels && mipmap->count < 16) {
        CUarray array = object_new(OBJECT_ARRAY);
        result = array ? describe(&level, array) : CUDA_ERROR_OUT_OF_MEMORY;
        if (array) {
            array->context = context;
            array->level = true;
            mipmap->bytes += array->bytes;
            mipmap->levels[mipmap->count++] = array;
        }
        level.Width = level.Width > 1 ? level.Width / 2 : level.Width;
        level.Height = level.Height > 1 ? level.Height / 2 : level.Height;
        level.Depth = level.Depth > 1 && !(level.Flags & LAYERS) ? level.Depth / 2 : level.Depth; /* layers stay */
    }
    if (!result)
        result = charge(context->card, mipmap->bytes);
    if (!result) {
        *out = mipmap;
        return CUDA_SUCCESS;
    }
    for (unsigned i = 0; i < mipmap->count; i++)
        object_free(mipmap->levels[i]);
    object_free(mipmap);
    return result;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUmipmappedArray mipmap,
                                               CUdevice device) {
    ENTER_DEVICE(device);
    if (!requirements || !object_is(mipmap, OBJECT_MIPMAP))
        return !requirements ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *requirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = mipmap->bytes, .alignment = 512};
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray mipmap, unsigned int level) {
    ENTER();
    if (!object_is(mipmap, OBJECT_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || level >= mipmap->count)
        return CUDA_ERROR_INVALID_VALUE;
    *out = mipmap->levels[level];
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmap) {
    ENTER();
    if (!object_is(mipmap, OBJECT_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < mipmap->count; i++) {
        if (mipmap->levels[i]->contents)
            munmap(mipmap->levels[i]->contents, mipmap->levels[i]->bytes);
        object_free(mipmap->levels[i]);
    }
    uncharge(mipmap->context->card, mipmap->bytes);
    object_free(mipmap);
    return CUDA_SUCCESS;
}
