/* Does a real-time thread that waits for another one, on the same processor, let it work? Runs on other_driver.c as
 * libcuda.so.1. Prints "asleep", or "spins" where the waiting thread never slept; "not allowed" where this process may
 * have no real-time threads. Argument: which call. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static sem_t inside, go;
static atomic_int waiter;
static const char *held, *chosen;
static CUmemoryPool pool;
static atomic_bool once;

static void meanwhile(const char *entry, int after) {
    if (after || strcmp(entry, held) != 0 || atomic_exchange(&once, true))
        return;
    sem_post(&inside);
    sem_wait(&go);
}

static void call(void) {
    CUcontext context;
    CUdeviceptr pointer;
    if (strcmp(chosen, "context") == 0)
        cuDevicePrimaryCtxRetain(&context, 0);
    else
        cuMemAllocFromPoolAsync(&pointer, 1, pool, (CUstream)16);
}

static void *first(void *none) {
    call();
    return none;
}

static void *second(void *none) {
    atomic_store(&waiter, (int)syscall(SYS_gettid));
    call();
    return none;
}

static int sleeps(int thread) {
    char path[64], text[256];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[length] = 0;
    const char *state = strrchr(text, ')');
    return state && state[2] == 'S';
}

int main(int count, char **words) {
    (void)count;
    chosen = words[1];
    held = strcmp(chosen, "context") == 0 ? "cuDevicePrimaryCtxRetain" : "cuMemPoolGetAttribute";
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    sem_init(&inside, 0, 0);
    sem_init(&go, 0, 0);
    cuInit(0);
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    cuMemPoolCreate(&pool, &properties);
    *(void (**)(const char *, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "other_meanwhile") = meanwhile;
    pthread_t a, b;
    pthread_attr_t attributes;
    const struct sched_param priority = {.sched_priority = 10};
    pthread_create(&a, NULL, first, NULL);
    sem_wait(&inside);
    pthread_attr_init(&attributes);
    pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
    pthread_attr_setschedpolicy(&attributes, SCHED_FIFO);
    pthread_attr_setschedparam(&attributes, &priority);
    const int refused = pthread_create(&b, &attributes, second, NULL);
    int seen = 0;
    for (const time_t end = time(NULL) + 5; !refused && seen < 20 && time(NULL) < end;) {
        usleep(1000);
        seen = waiter && sleeps(waiter) ? seen + 1 : 0;
    }
    sem_post(&go);
    pthread_join(a, NULL);
    if (!refused)
        pthread_join(b, NULL);
    puts(refused ? "not allowed" : seen == 20 ? "asleep" : "spins");
    return 0;
}
