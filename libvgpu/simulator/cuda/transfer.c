/* Copies and fills, with real contents. Like kernels' work on memory (touch.c), they happen at once, so that each call
 * sees what was issued before it. Synchronous calls also wait for earlier work, as in the driver. Their time: bus.c. */
#include <string.h>

#include "cuda/driver.h"

/* Whether one mapping covers the range and was never written: all zero. */
static bool is_blank(int device, CUdeviceptr address, size_t bytes) {
    if (address < RESERVATION_WINDOW)
        return false;
    pthread_mutex_lock(&driver.lock);
    const struct range *range = range_find(address, false);
    bool blank = range && range->kind == RANGE_MAPPED &&
                 access_of(range, device) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && !range->physical->multicast &&
                 !range->physical->contents && bytes <= range->size - (address - range->base);
    pthread_mutex_unlock(&driver.lock);
    return blank;
}

CUresult copy_bytes(struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    if (is_blank(sides.from, from, bytes) && is_blank(sides.to, to, bytes))
        return CUDA_SUCCESS;
    while (bytes) {
        char *target, *source;
        size_t target_length, source_length;
        CUresult result = view(sides.to, to, bytes, true, &target, &target_length);
        if (!result)
            result = view(sides.from, from, bytes, false, &source, &source_length);
        if (result)
            return result;
        size_t length = target_length < source_length ? target_length : source_length;
        memmove(target, source, length);
        to += length;
        from += length;
        bytes -= length;
    }
    return CUDA_SUCCESS;
}

CUresult set_elements(int device, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                      size_t height) {
    if (to % element || (height > 1 && pitch < width * element))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < height; row++) {
        size_t left = width * element;
        for (CUdeviceptr at = to + row * pitch; left;) {
            char *target;
            size_t length;
            CUresult result = view(device, at, left, true, &target, &length);
            if (result)
                return result;
            length -= length % element;
            if (element == 1)
                memset(target, (int)value, length);
            else
                for (size_t i = 0; i < length; i += element)
                    memcpy(target + i, &value, element); /* little-endian, like every machine with a driver */
            at += length;
            left -= length;
        }
    }
    return CUDA_SUCCESS;
}

static bool on_device(CUdeviceptr address) {
    if (address >= DEVICE_WINDOW)
        return true;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    pthread_mutex_unlock(&driver.lock);
    return range != NULL; /* managed, or host memory that is mapped for the device */
}

/* A synchronous call is work of the legacy stream for which the caller waits. */
static CUresult legacy_wait(CUstream stream) {
    CUresult result = capture_implicit(stream);
    return result ? result : stream_wait(stream);
}

static CUresult legacy_set(CUstream stream) {
    CUresult result = capture_implicit(stream);
    return result ? result : capture_forbids(stream);
}

static struct sides sides_of(CUstream stream) {
    return (struct sides){stream->context->device, stream->context->device};
}

/* `arrays`: as for bus_copy. `named`: the contexts that the call names; NULL: the stream's context on both sides. */
static CUresult copy_between(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, bool wait,
                             unsigned arrays, const struct sides *named) {
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !bytes)
        return result;
    if (!to || !from)
        return CUDA_ERROR_INVALID_VALUE;
    struct sides sides = named ? *named : sides_of(stream);
    result = wait ? legacy_wait(stream) : capture_copy(stream, sides, to, from, bytes);
    if (wait ? result : result != CUDA_ERROR_NOT_READY)
        return result;
    result = copy_bytes(sides, to, from, bytes);
    if (!result)
        bus_copy(stream, to, from, bytes, arrays);
    return result || !wait || !driver.sim.timing.within ? result : stream_wait(stream);
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, bool wait) {
    return copy_between(to, from, bytes, handle, wait, 0, NULL);
}

static CUresult set(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
                    CUstream handle, bool wait) {
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !width || !height)
        return result;
    if (!to || !on_device(to))
        return CUDA_ERROR_INVALID_VALUE;
    result = wait ? legacy_set(stream) : capture_set(stream, to, pitch, value, element, width, height);
    if (wait ? result : result != CUDA_ERROR_NOT_READY)
        return result;
    char *first;
    size_t length;
    result = view(stream->context->device, to, 1, true, &first, &length);
    if (!result)
        bus_set(stream, to,
                (uint64_t)width * element *
                    height); /* first, because the host's time for the contents is not the card's time */
    return result ? result : set_elements(stream->context->device, to, pitch, value, element, width, height);
}

#define HOST(p) ((CUdeviceptr)(uintptr_t)(p))
/* A named direction requires device memory; plain host memory there is an error of the caller. */
#define DEVICE_SIDE(p)                                                                                                 \
    do {                                                                                                               \
        if (!driver_ready())                                                                                           \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                         \
        if (!on_device(p))                                                                                             \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
    } while (0)

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    INJECT();
    return copy(to, from, bytes, NULL, true);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    INJECT();
    return copy(to, from, bytes, stream, false);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    INJECT();
    DEVICE_SIDE(to);
    return copy(to, HOST(from), bytes, NULL, true);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    INJECT();
    DEVICE_SIDE(from);
    return copy(HOST(to), from, bytes, NULL, true);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    INJECT();
    DEVICE_SIDE(to);
    DEVICE_SIDE(from);
    return copy(to, from, bytes, NULL, false);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    INJECT();
    DEVICE_SIDE(to);
    return copy(to, HOST(from), bytes, stream, false);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    INJECT();
    DEVICE_SIDE(from);
    return copy(HOST(to), from, bytes, stream, false);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    INJECT();
    DEVICE_SIDE(to);
    DEVICE_SIDE(from);
    return copy(to, from, bytes, stream, false);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
    ENTER();
    if (!object_is(to_context, OBJECT_CONTEXT) || !object_is(from_context, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_between(to, from, bytes, NULL, true, 0, &(struct sides){to_context->device, from_context->device});
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
                           CUstream stream) {
    ENTER();
    if (!object_is(to_context, OBJECT_CONTEXT) || !object_is(from_context, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_between(to, from, bytes, stream, false, 0, &(struct sides){to_context->device, from_context->device});
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    INJECT();
    return set(to, 0, value, 1, count, 1, NULL, true);
}
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    INJECT();
    return set(to, 0, value, 2, count, 1, NULL, true);
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
    INJECT();
    return set(to, 0, value, 4, count, 1, NULL, true);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream s) {
    INJECT();
    return set(to, 0, value, 1, count, 1, s, false);
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream s) {
    INJECT();
    return set(to, 0, value, 2, count, 1, s, false);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream s) {
    INJECT();
    return set(to, 0, value, 4, count, 1, s, false);
}

#define SET_2D(name, type, element)                                                                                    \
    CUresult name##_v2(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height) {                        \
        INJECT();                                                                                                      \
        return set(to, pitch, value, element, width, height, NULL, true);                                              \
    }                                                                                                                  \
    CUresult name##Async(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream) {     \
        INJECT();                                                                                                      \
        return set(to, pitch, value, element, width, height, stream, false);                                           \
    }
SET_2D(cuMemsetD2D8, unsigned char, 1)
SET_2D(cuMemsetD2D16, unsigned short, 2)
SET_2D(cuMemsetD2D32, unsigned int, 4)

/* One side of a pitched copy: the start of a row. */
static CUresult row_of(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array, size_t pitch,
                       size_t height, size_t x, size_t y, size_t z, size_t bytes, CUdeviceptr *out) {
    if (type == CU_MEMORYTYPE_ARRAY) {
        if (!object_is(array, OBJECT_ARRAY))
            return CUDA_ERROR_INVALID_HANDLE;
        size_t depth = array->bytes / (array->pitch * array->rows);
        if (x + bytes > array->pitch || y >= array->rows || z >= depth)
            return CUDA_ERROR_INVALID_VALUE;
        if (!array->contents && !(array->contents = zero_pages(array->bytes)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        *out = HOST(array->contents) + (z * array->rows + y) * array->pitch + x;
        return CUDA_SUCCESS;
    }
    CUdeviceptr base = type == CU_MEMORYTYPE_HOST ? HOST(host) : device;
    if (!base || (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED))
        return CUDA_ERROR_INVALID_VALUE;
    *out = base + (z * height + y) * pitch + x;
    return CUDA_SUCCESS;
}

static CUresult copy_3d_between(const CUDA_MEMCPY3D *c, CUstream handle, bool wait, const struct sides *named) {
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    struct sides sides = named ? *named : sides_of(stream);
    CUdeviceptr first_to = 0, first_from = 0;
    result = wait ? legacy_wait(stream) : CUDA_SUCCESS;
    for (size_t z = 0; z < c->Depth && !result; z++)
        for (size_t y = 0; y < c->Height && !result; y++) {
            CUdeviceptr to, from;
            result = row_of(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, c->dstPitch, c->dstHeight,
                            c->dstXInBytes, c->dstY + y, c->dstZ + z, c->WidthInBytes, &to);
            if (!result)
                result = row_of(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, c->srcPitch, c->srcHeight,
                                c->srcXInBytes, c->srcY + y, c->srcZ + z, c->WidthInBytes, &from);
            if (!result)
                result = wait ? copy_bytes(sides, to, from, c->WidthInBytes)
                              : capture_copy(stream, sides, to, from, c->WidthInBytes);
            if (!wait && result == CUDA_ERROR_NOT_READY)
                result = copy_bytes(sides, to, from, c->WidthInBytes);
            if (!y && !z) {
                first_to = to;
                first_from = from;
            }
        }
    uint64_t bytes = (uint64_t)c->WidthInBytes * c->Height * c->Depth;
    if (result || !bytes || stream->capture)
        return result;
    bus_copy(stream, first_to, first_from, bytes,
             (c->dstMemoryType == CU_MEMORYTYPE_ARRAY ? BUS_TO_ARRAY : 0) |
                 (c->srcMemoryType == CU_MEMORYTYPE_ARRAY ? BUS_FROM_ARRAY : 0));
    return wait ? stream_wait(stream) : CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, bool wait) {
    return copy_3d_between(c, stream, wait, NULL);
}

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *c) {
    INJECT();
    return copy_3d(c, NULL, true);
}
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream stream) {
    INJECT();
    return copy_3d(c, stream, false);
}

static CUresult copy_3d_peer(const CUDA_MEMCPY3D_PEER *c, CUstream stream, bool wait) {
    ENTER();
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_is(c->srcContext, OBJECT_CONTEXT) || !object_is(c->dstContext, OBJECT_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    CUDA_MEMCPY3D plain = {.srcXInBytes = c->srcXInBytes,
                           .srcY = c->srcY,
                           .srcZ = c->srcZ,
                           .srcMemoryType = c->srcMemoryType,
                           .srcHost = c->srcHost,
                           .srcDevice = c->srcDevice,
                           .srcArray = c->srcArray,
                           .srcPitch = c->srcPitch,
                           .srcHeight = c->srcHeight,
                           .dstXInBytes = c->dstXInBytes,
                           .dstY = c->dstY,
                           .dstZ = c->dstZ,
                           .dstMemoryType = c->dstMemoryType,
                           .dstHost = c->dstHost,
                           .dstDevice = c->dstDevice,
                           .dstArray = c->dstArray,
                           .dstPitch = c->dstPitch,
                           .dstHeight = c->dstHeight,
                           .WidthInBytes = c->WidthInBytes,
                           .Height = c->Height,
                           .Depth = c->Depth};
    return copy_3d_between(&plain, stream, wait, &(struct sides){c->dstContext->device, c->srcContext->device});
}

CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *c) {
    INJECT();
    return copy_3d_peer(c, NULL, true);
}
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *c, CUstream stream) {
    INJECT();
    return copy_3d_peer(c, stream, false);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool wait) {
    ENTER();
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D wide = {.srcXInBytes = c->srcXInBytes,
                          .srcY = c->srcY,
                          .srcMemoryType = c->srcMemoryType,
                          .srcHost = c->srcHost,
                          .srcDevice = c->srcDevice,
                          .srcArray = c->srcArray,
                          .srcPitch = c->srcPitch ? c->srcPitch : c->WidthInBytes,
                          .dstXInBytes = c->dstXInBytes,
                          .dstY = c->dstY,
                          .dstMemoryType = c->dstMemoryType,
                          .dstHost = c->dstHost,
                          .dstDevice = c->dstDevice,
                          .dstArray = c->dstArray,
                          .dstPitch = c->dstPitch ? c->dstPitch : c->WidthInBytes,
                          .WidthInBytes = c->WidthInBytes,
                          .Height = c->Height,
                          .Depth = 1};
    return copy_3d(&wide, stream, wait);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *c) {
    INJECT();
    return copy_2d(c, NULL, true);
}
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *c) {
    INJECT();
    return copy_2d(c, NULL, true);
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream) {
    INJECT();
    return copy_2d(c, stream, false);
}

static CUresult array_row(CUarray array, size_t offset, size_t bytes, CUdeviceptr *out) {
    ENTER();
    return row_of(CU_MEMORYTYPE_ARRAY, NULL, 0, array, 0, 0, offset, 0, 0, bytes, out);
}

CUresult cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
    INJECT();
    CUdeviceptr row;
    CUresult result = array_row(to, offset, bytes, &row);
    return result ? result : copy_between(row, from, bytes, NULL, true, BUS_TO_ARRAY, NULL);
}

CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
    INJECT();
    CUdeviceptr row;
    CUresult result = array_row(from, offset, bytes, &row);
    return result ? result : copy_between(to, row, bytes, NULL, true, BUS_FROM_ARRAY, NULL);
}

CUresult cuMemcpyHtoA_v2(CUarray to, size_t offset, const void *from, size_t bytes) {
    INJECT();
    return cuMemcpyDtoA_v2(to, offset, HOST(from), bytes);
}
CUresult cuMemcpyAtoH_v2(void *to, CUarray from, size_t offset, size_t bytes) {
    INJECT();
    return cuMemcpyAtoD_v2(HOST(to), from, offset, bytes);
}

CUresult cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes) {
    INJECT();
    CUdeviceptr row, target;
    CUresult result = array_row(from, from_offset, bytes, &row), wrong = array_row(to, to_offset, bytes, &target);
    return result || wrong ? (result ? result : wrong)
                           : copy_between(target, row, bytes, NULL, true, BUS_TO_ARRAY | BUS_FROM_ARRAY, NULL);
}

CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream) {
    INJECT();
    CUdeviceptr row;
    CUresult result = array_row(to, offset, bytes, &row);
    return result ? result : copy_between(row, HOST(from), bytes, stream, false, BUS_TO_ARRAY, NULL);
}

CUresult cuMemcpyAtoHAsync_v2(void *to, CUarray from, size_t offset, size_t bytes, CUstream stream) {
    INJECT();
    CUdeviceptr row;
    CUresult result = array_row(from, offset, bytes, &row);
    return result ? result : copy_between(HOST(to), row, bytes, stream, false, BUS_FROM_ARRAY, NULL);
}
