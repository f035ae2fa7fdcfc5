/* What a client of the driver says when a call fails: where, which and why; then it ends, whatever its other threads
 * do. */
#ifndef VGPU_CLIENTS_OK_H
#define VGPU_CLIENTS_OK_H
#include <cuda.h>
#include <stdio.h>
#include <unistd.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        CUresult answer_ = (call);                                                                                     \
        if (answer_ != CUDA_SUCCESS) {                                                                                 \
            printf("line %d: %s: %d\n", __LINE__, #call, (int)answer_);                                                \
            fflush(stdout);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#endif
