/* Fills of memory. */
#define _GNU_SOURCE
#include "hooks/measured.h"

/* `bytes`: total bytes; each element size is another kernel. */
#define FILL(symbol, parameters, arguments, stream, bytes, element)                                                    \
    MEASURED_CALLING(symbol, parameters, arguments, stream, vgpu_fills_are_paced(),                                    \
                     vgpu_cost_key(&vgpu_fill_work, bytes, element), real arguments)

FILL(cuMemsetD16, (CUdeviceptr_v1 to, unsigned short value, unsigned int count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count * 2, 2)
FILL(cuMemsetD16_v2, (CUdeviceptr to, unsigned short value, size_t count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count * 2, 2)
FILL(cuMemsetD16_v2_ptds, (CUdeviceptr to, unsigned short value, size_t count), (to, value, count),
     CU_STREAM_PER_THREAD, (uint64_t)count * 2, 2)
FILL(cuMemsetD16Async, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream),
     (to, value, count, stream), stream, (uint64_t)count * 2, 2)
FILL(cuMemsetD16Async_ptsz, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream),
     (to, value, count, stream), per_thread(stream), (uint64_t)count * 2, 2)
FILL(cuMemsetD2D16,
     (CUdeviceptr_v1 to, unsigned int pitch, unsigned short value, unsigned int width, unsigned int height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width * height * 2, 2)
FILL(cuMemsetD2D16_v2, (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width * height * 2, 2)
FILL(cuMemsetD2D16_v2_ptds, (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_PER_THREAD, (uint64_t)width * height * 2, 2)
FILL(cuMemsetD2D16Async,
     (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), stream, (uint64_t)width * height * 2, 2)
FILL(cuMemsetD2D16Async_ptsz,
     (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), per_thread(stream), (uint64_t)width * height * 2, 2)
FILL(cuMemsetD2D32,
     (CUdeviceptr_v1 to, unsigned int pitch, unsigned int value, unsigned int width, unsigned int height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width * height * 4, 4)
FILL(cuMemsetD2D32_v2, (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width * height * 4, 4)
FILL(cuMemsetD2D32_v2_ptds, (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_PER_THREAD, (uint64_t)width * height * 4, 4)
FILL(cuMemsetD2D32Async,
     (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), stream, (uint64_t)width * height * 4, 4)
FILL(cuMemsetD2D32Async_ptsz,
     (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), per_thread(stream), (uint64_t)width * height * 4, 4)
FILL(cuMemsetD2D8,
     (CUdeviceptr_v1 to, unsigned int pitch, unsigned char value, unsigned int width, unsigned int height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width *height, 1)
FILL(cuMemsetD2D8_v2, (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_LEGACY, (uint64_t)width *height, 1)
FILL(cuMemsetD2D8_v2_ptds, (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height),
     (to, pitch, value, width, height), CU_STREAM_PER_THREAD, (uint64_t)width *height, 1)
FILL(cuMemsetD2D8Async,
     (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), stream, (uint64_t)width *height, 1)
FILL(cuMemsetD2D8Async_ptsz,
     (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream),
     (to, pitch, value, width, height, stream), per_thread(stream), (uint64_t)width *height, 1)
FILL(cuMemsetD32, (CUdeviceptr_v1 to, unsigned int value, unsigned int count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count * 4, 4)
FILL(cuMemsetD32_v2, (CUdeviceptr to, unsigned int value, size_t count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count * 4, 4)
FILL(cuMemsetD32_v2_ptds, (CUdeviceptr to, unsigned int value, size_t count), (to, value, count), CU_STREAM_PER_THREAD,
     (uint64_t)count * 4, 4)
FILL(cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), (to, value, count, stream),
     stream, (uint64_t)count * 4, 4)
FILL(cuMemsetD32Async_ptsz, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream),
     (to, value, count, stream), per_thread(stream), (uint64_t)count * 4, 4)
FILL(cuMemsetD8, (CUdeviceptr_v1 to, unsigned char value, unsigned int count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count, 1)
FILL(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count), (to, value, count), CU_STREAM_LEGACY,
     (uint64_t)count, 1)
FILL(cuMemsetD8_v2_ptds, (CUdeviceptr to, unsigned char value, size_t count), (to, value, count), CU_STREAM_PER_THREAD,
     (uint64_t)count, 1)
FILL(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), (to, value, count, stream),
     stream, (uint64_t)count, 1)
FILL(cuMemsetD8Async_ptsz, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream),
     (to, value, count, stream), per_thread(stream), (uint64_t)count, 1)
