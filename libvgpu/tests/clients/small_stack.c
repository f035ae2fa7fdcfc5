/* What tools ask, on a thread with a small stack. Prints the results. Arguments: KiB of the stack; "first": the library
 * begins on that thread. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <nvml.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ASK(name) ((__typeof__(&name))dlsym(ml, #name))
static void *ml;
static int results[5];
static nvmlDevice_t device;

static void *ask(void *none) {
    static nvmlProcessInfo_t processes[64];
    unsigned count = 64;
    CUdeviceptr pointer;
    CUcontext context;
    results[0] = cuInit(0);
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    results[1] = cuMemAlloc(&pointer, 1 << 20);
    results[2] = cuMemAlloc(&pointer, (size_t)1 << 40); /* refused, after others were looked at */
    results[3] = ASK(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, processes);
    results[4] = (int)count;
    return none;
}

int main(int count, char **words) {
    pthread_t thread;
    pthread_attr_t attributes;
    ml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    ASK(nvmlInit_v2)();
    ASK(nvmlDeviceGetHandleByIndex_v2)(0, &device);
    if (count < 3 || strcmp(words[2], "first") != 0)
        cuInit(0);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)atoi(words[1]) << 10);
    if (pthread_create(&thread, &attributes, ask, NULL) != 0 || pthread_join(thread, NULL) != 0)
        return 1;
    for (int i = 0; i < 5; i++)
        printf("%d ", results[i]);
    puts("");
    return 0;
}
