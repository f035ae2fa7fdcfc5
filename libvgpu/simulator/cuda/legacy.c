/* The 32-bit entry points of CUDA 2 and 3. Device addresses of this driver never fit into them, so calls with a device
 * address fail as for a wrong address. Their work on host memory and arrays is real. Sizes that do not fit are cut to
 * the largest value that does. */
#include "cuda/driver.h"

static unsigned narrow(size_t value) {
    return value > 0xffffffffu ? 0xffffffffu : (unsigned)value;
}

CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total) {
    INJECT();
    size_t wide_free, wide_total;
    CUresult result = free_bytes && total ? cuMemGetInfo_v2(&wide_free, &wide_total) : CUDA_ERROR_INVALID_VALUE;
    if (!result) {
        *free_bytes = narrow(wide_free);
        *total = narrow(wide_total);
    }
    return result;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    INJECT();
    size_t total;
    CUresult result = bytes ? cuDeviceTotalMem_v2(&total, device) : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        *bytes = narrow(total);
    return result;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *out, unsigned int bytes) {
    ENTER();
    return out && bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *out, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element) {
    ENTER();
    bool legal = out && pitch && width && height && (element == 4 || element == 8 || element == 16);
    return legal ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree(CUdeviceptr_v1 address) {
    ENTER();
    return address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **out, unsigned int bytes) {
    INJECT();
    return cuMemAllocHost_v2(out, bytes);
}

CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 address) {
    INJECT();
    (void)base, (void)size;
    return cuMemGetAddressRange_v2(NULL, NULL, address);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *out, void *address, unsigned int flags) {
    INJECT();
    CUdeviceptr wide;
    CUresult result = out ? cuMemHostGetDevicePointer_v2(&wide, address, flags) : CUDA_ERROR_INVALID_VALUE;
    if (!result && wide > 0xffffffffu)
        return CUDA_ERROR_INVALID_VALUE;
    if (!result)
        *out = (CUdeviceptr_v1)wide;
    return result;
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1 *out, unsigned int *bytes, CUmodule module, const char *name) {
    INJECT();
    (void)out, (void)bytes;
    CUresult result = cuModuleGetGlobal_v2(NULL, NULL, module, name);
    return result ? result : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *narrow_one) {
    INJECT();
    if (!narrow_one)
        return cuArrayCreate_v2(out, NULL);
    return cuArrayCreate_v2(out, &(CUDA_ARRAY_DESCRIPTOR){.Width = narrow_one->Width,
                                                          .Height = narrow_one->Height,
                                                          .Format = narrow_one->Format,
                                                          .NumChannels = narrow_one->NumChannels});
}

CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *narrow_one) {
    INJECT();
    if (!narrow_one)
        return cuArray3DCreate_v2(out, NULL);
    return cuArray3DCreate_v2(out, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = narrow_one->Width,
                                                              .Height = narrow_one->Height,
                                                              .Depth = narrow_one->Depth,
                                                              .Format = narrow_one->Format,
                                                              .NumChannels = narrow_one->NumChannels,
                                                              .Flags = narrow_one->Flags});
}

CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *out, CUarray array) {
    INJECT();
    CUDA_ARRAY_DESCRIPTOR wide;
    CUresult result = cuArrayGetDescriptor_v2(out ? &wide : NULL, array);
    if (!result)
        *out = (CUDA_ARRAY_DESCRIPTOR_v1){.Width = narrow(wide.Width),
                                          .Height = narrow(wide.Height),
                                          .Format = wide.Format,
                                          .NumChannels = wide.NumChannels};
    return result;
}

CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *out, CUarray array) {
    INJECT();
    CUDA_ARRAY3D_DESCRIPTOR wide;
    CUresult result = cuArray3DGetDescriptor_v2(out ? &wide : NULL, array);
    if (!result)
        *out = (CUDA_ARRAY3D_DESCRIPTOR_v1){.Width = narrow(wide.Width),
                                            .Height = narrow(wide.Height),
                                            .Depth = narrow(wide.Depth),
                                            .Format = wide.Format,
                                            .NumChannels = wide.NumChannels,
                                            .Flags = wide.Flags};
    return result;
}

CUresult cuMemcpyHtoD(CUdeviceptr_v1 to, const void *from, unsigned int bytes) {
    INJECT();
    return cuMemcpyHtoD_v2(to, from, bytes);
}
CUresult cuMemcpyDtoH(void *to, CUdeviceptr_v1 from, unsigned int bytes) {
    INJECT();
    return cuMemcpyDtoH_v2(to, from, bytes);
}
CUresult cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes) {
    INJECT();
    return cuMemcpyDtoD_v2(to, from, bytes);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr_v1 to, const void *from, unsigned int bytes, CUstream stream) {
    INJECT();
    return cuMemcpyHtoDAsync_v2(to, from, bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream) {
    INJECT();
    return cuMemcpyDtoHAsync_v2(to, from, bytes, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream) {
    INJECT();
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

/* cuMemcpyDtoA_v2 accepts host memory as a source, because HtoA is built on it */
CUresult cuMemcpyDtoA(CUarray to, unsigned int offset, CUdeviceptr_v1 from, unsigned int bytes) {
    ENTER();
    (void)offset, (void)from, (void)bytes;
    return object_is(to, OBJECT_ARRAY) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuMemcpyAtoD(CUdeviceptr_v1 to, CUarray from, unsigned int offset, unsigned int bytes) {
    INJECT();
    return cuMemcpyDtoA(from, offset, to, bytes);
}

CUresult cuMemcpyHtoA(CUarray to, unsigned int offset, const void *from, unsigned int bytes) {
    INJECT();
    return cuMemcpyHtoA_v2(to, offset, from, bytes);
}
CUresult cuMemcpyAtoH(void *to, CUarray from, unsigned int offset, unsigned int bytes) {
    INJECT();
    return cuMemcpyAtoH_v2(to, from, offset, bytes);
}

CUresult cuMemcpyAtoA(CUarray to, unsigned int to_offset, CUarray from, unsigned int from_offset, unsigned int bytes) {
    INJECT();
    return cuMemcpyAtoA_v2(to, to_offset, from, from_offset, bytes);
}

CUresult cuMemcpyHtoAAsync(CUarray to, unsigned int offset, const void *from, unsigned int bytes, CUstream stream) {
    INJECT();
    return cuMemcpyHtoAAsync_v2(to, offset, from, bytes, stream);
}

CUresult cuMemcpyAtoHAsync(void *to, CUarray from, unsigned int offset, unsigned int bytes, CUstream stream) {
    INJECT();
    return cuMemcpyAtoHAsync_v2(to, from, offset, bytes, stream);
}

static CUDA_MEMCPY2D wide_2d(const CUDA_MEMCPY2D_v1 *c) {
    return (CUDA_MEMCPY2D){.srcXInBytes = c->srcXInBytes,
                           .srcY = c->srcY,
                           .srcMemoryType = c->srcMemoryType,
                           .srcHost = c->srcHost,
                           .srcDevice = c->srcDevice,
                           .srcArray = c->srcArray,
                           .srcPitch = c->srcPitch,
                           .dstXInBytes = c->dstXInBytes,
                           .dstY = c->dstY,
                           .dstMemoryType = c->dstMemoryType,
                           .dstHost = c->dstHost,
                           .dstDevice = c->dstDevice,
                           .dstArray = c->dstArray,
                           .dstPitch = c->dstPitch,
                           .WidthInBytes = c->WidthInBytes,
                           .Height = c->Height};
}

static CUDA_MEMCPY3D wide_3d(const CUDA_MEMCPY3D_v1 *c) {
    return (CUDA_MEMCPY3D){.srcXInBytes = c->srcXInBytes,
                           .srcY = c->srcY,
                           .srcZ = c->srcZ,
                           .srcLOD = c->srcLOD,
                           .srcMemoryType = c->srcMemoryType,
                           .srcHost = c->srcHost,
                           .srcDevice = c->srcDevice,
                           .srcArray = c->srcArray,
                           .srcPitch = c->srcPitch,
                           .srcHeight = c->srcHeight,
                           .dstXInBytes = c->dstXInBytes,
                           .dstY = c->dstY,
                           .dstZ = c->dstZ,
                           .dstLOD = c->dstLOD,
                           .dstMemoryType = c->dstMemoryType,
                           .dstHost = c->dstHost,
                           .dstDevice = c->dstDevice,
                           .dstArray = c->dstArray,
                           .dstPitch = c->dstPitch,
                           .dstHeight = c->dstHeight,
                           .WidthInBytes = c->WidthInBytes,
                           .Height = c->Height,
                           .Depth = c->Depth};
}

#define COPY(name, type, widen, parameters, arguments)                                                                 \
    CUresult name parameters {                                                                                         \
        INJECT();                                                                                                      \
        type wide;                                                                                                     \
        if (c)                                                                                                         \
            wide = widen(c);                                                                                           \
        return name##_v2 arguments;                                                                                    \
    }
COPY(cuMemcpy2D, CUDA_MEMCPY2D, wide_2d, (const CUDA_MEMCPY2D_v1 *c), (c ? &wide : NULL))
COPY(cuMemcpy2DUnaligned, CUDA_MEMCPY2D, wide_2d, (const CUDA_MEMCPY2D_v1 *c), (c ? &wide : NULL))
COPY(cuMemcpy2DAsync, CUDA_MEMCPY2D, wide_2d, (const CUDA_MEMCPY2D_v1 *c, CUstream stream), (c ? &wide : NULL, stream))
COPY(cuMemcpy3D, CUDA_MEMCPY3D, wide_3d, (const CUDA_MEMCPY3D_v1 *c), (c ? &wide : NULL))
COPY(cuMemcpy3DAsync, CUDA_MEMCPY3D, wide_3d, (const CUDA_MEMCPY3D_v1 *c, CUstream stream), (c ? &wide : NULL, stream))

CUresult cuMemsetD8(CUdeviceptr_v1 to, unsigned char value, unsigned int count) {
    INJECT();
    return cuMemsetD8_v2(to, value, count);
}
CUresult cuMemsetD16(CUdeviceptr_v1 to, unsigned short value, unsigned int count) {
    INJECT();
    return cuMemsetD16_v2(to, value, count);
}
CUresult cuMemsetD32(CUdeviceptr_v1 to, unsigned int value, unsigned int count) {
    INJECT();
    return cuMemsetD32_v2(to, value, count);
}

#define SET_2D(name, type)                                                                                             \
    CUresult name(CUdeviceptr_v1 to, unsigned int pitch, type value, unsigned int width, unsigned int height) {        \
        INJECT();                                                                                                      \
        return name##_v2(to, pitch, value, width, height);                                                             \
    }
SET_2D(cuMemsetD2D8, unsigned char)
SET_2D(cuMemsetD2D16, unsigned short)
SET_2D(cuMemsetD2D32, unsigned int)
