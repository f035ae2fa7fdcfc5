/* Takes as much of the first card as it can get, to the last byte.
 *
 *   grab [LIBCUDA]         prints "INIT CONTEXT BYTES": what cuInit and cuCtxCreate answered, and the bytes got; ends
 * at end of input grab -d [LIBCUDA]      the same as a daemon: forks twice, closes every descriptor and stays, until
 * the file /run/scratch/end exists grab -n [LIBCUDA]      such a daemon that has asked NVML before grab -c [LIBCUDA]
 * forks a child afterwards that stays until the same file exists grab -t [LIBCUDA]      the main thread leaves by
 * pthread_exit; another one takes the memory
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *library = "libcuda.so.1", *how;

static void stay(void) {
    struct stat status;
    const struct timespec moment = {.tv_nsec = 2000000};
    while (stat("/run/scratch/end", &status) != 0)
        nanosleep(&moment, NULL);
    _exit(0);
}

static void grab(void) {
    void *driver = dlopen(library, RTLD_NOW);
    if (!driver) {
        printf("%s\n", dlerror());
        exit(1);
    }
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    int (*create)(void **, unsigned, int) = dlsym(driver, "cuCtxCreate_v2");
    int (*allocate)(unsigned long long *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    void *context;
    const int initialised = init(0), created = create(&context, 0, 0);
    size_t total = 0;
    for (size_t size = 1ul << 34; size;) {
        unsigned long long pointer;
        if (allocate(&pointer, size) == 0)
            total += size;
        else
            size /= 2;
    }
    if (*how && how[1] == 'c' && fork() == 0)
        stay();
    printf("%d %d %zu\n", initialised, created, total);
    fflush(stdout);
}

static void *grab_and_wait(void *unused) {
    (void)unused;
    grab();
    while (getchar() != EOF)
        ;
    exit(0);
}

/* The library then knows its region before the process forks; unlike the driver, NVML allows that. */
static void ask_nvml(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *card;
    if (!nvml)
        exit(1);
    unsigned long long memory[3];
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*handle)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, void *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    if (init() || handle(0, &card) || info(card, memory))
        exit(1);
}

static void become_daemon(void) {
    if (fork())
        exit(0);
    setsid();
    if (fork())
        exit(0);
    grab();
    for (int fd = 0; fd < 1024; fd++)
        close(fd);
    stay();
}

int main(int count, char **words) {
    how = count > 1 && words[1][0] == '-' ? words[1] : "";
    if (count > 1 + (how[0] != 0))
        library = words[count - 1];
    if (strcmp(how, "-n") == 0)
        ask_nvml();
    if (strcmp(how, "-d") == 0 || strcmp(how, "-n") == 0)
        become_daemon();
    if (strcmp(how, "-t") == 0) {
        pthread_t other;
        pthread_create(&other, NULL, grab_and_wait, NULL);
        pthread_exit(NULL);
    }
    grab_and_wait(NULL);
}
