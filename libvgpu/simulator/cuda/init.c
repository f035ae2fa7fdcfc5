/* cuInit, the visible cards, and the checks at the start of every call. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/driver.h"

struct driver driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A page that a forked child finds empty, for any kind of fork. There the driver reports that it is not initialised, as
 * the real driver does. */
static _Atomic int *ready;
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static bool initialised;

bool driver_ready(void) {
    return ready && atomic_load_explicit(ready, memory_order_relaxed);
}

uint64_t driver_id(void) {
    return atomic_fetch_add(&driver.next_id, 2) + 1;
}

static const char *strictness;

static void read_strictness(void) {
    strictness = secure_getenv("VGPU_SIM_STRICT");
}

bool strict_about(const char *what) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_strictness);
    return strictness && strstr(strictness, what);
}

static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;
/* only a pointer: libraries that are opened late have little room for thread-local data */
static __thread struct thread_state *mine __attribute__((tls_model("initial-exec")));

static void make_thread_key(void) {
    if (pthread_key_create(&thread_key, free) != 0)
        abort();
}

static struct thread_state *new_thread_state(void) {
    pthread_once(&thread_once, make_thread_key);
    mine = calloc(1, sizeof *mine);
    if (!mine)
        abort(); /* only a few hundred bytes; no entry point could report this error */
    pthread_setspecific(thread_key, mine);
    return mine;
}

struct thread_state *thread_state(void) {
    return mine ? mine : new_thread_state();
}

bool driver_register(void) {
    pthread_mutex_lock(&init_lock);
    bool registered = driver.sim.self || sim_register(&driver.sim) == 0;
    pthread_mutex_unlock(&init_lock);
    return registered;
}

CUresult current_context(CUcontext *out) {
    if (!driver_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    struct thread_state *thread = thread_state();
    CUcontext context = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->dead || !object_is(context, OBJECT_CONTEXT))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *out = context->green ? context->base : context;
    return (CUresult)(*out)->failed;
}

CUresult charge(int card, uint64_t bytes) {
    int error = sim_charge(&driver.sim, card, bytes);
    if (error == -ENOMEM) {
        pools_trim(card);
        error = sim_charge(&driver.sim, card, bytes);
    }
    while (error == -ENOMEM && bytes <= sim_usable(driver.sim.profile) && managed_give_way(card, bytes))
        error = sim_charge(&driver.sim, card, bytes);
    return error == 0 ? CUDA_SUCCESS : error == -ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

int host_account(void) {
    const struct thread_state *thread = thread_state();
    CUcontext context = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    return context && object_is(context, OBJECT_CONTEXT) ? context->card : driver.visible[0];
}

void uncharge(int card, uint64_t bytes) {
    sim_uncharge(&driver.sim, card, bytes);
}

/* One entry of CUDA_VISIBLE_DEVICES: an index into the container's cards, or an unambiguous beginning of a UUID. */
static int visible_card(const char *name, size_t length, const int *cards, int count) {
    int found = -1;
    bool digits = length > 0 && length < 4;
    for (size_t i = 0; i < length; i++)
        digits = digits && isdigit((unsigned char)name[i]);
    if (digits) {
        int index = atoi(name);
        return index < count ? cards[index] : -1;
    }
    if (length < 5 || (strncasecmp(name, "GPU-", 4) != 0 && strncasecmp(name, "MIG-", 4) != 0))
        return -1;
    if (driver.sim.profile->mig && strncasecmp(driver.sim.state->board_uuid, name, length) == 0)
        return count ? cards[0] : -1; /* a board means its first instance */
    for (int i = 0; i < count; i++)
        if (strncasecmp(driver.sim.state->cards[cards[i]].uuid, name, length) == 0) {
            if (found >= 0)
                return -1;
            found = cards[i];
        }
    return found;
}

/* CUDA C++ Programming Guide, "CUDA Environment Variables": devices after the first invalid entry are not visible. If
 * one is named twice, no device is visible. */
static void find_visible(void) {
    int cards[SIM_CARDS], count = sim_container_cards(&driver.sim, cards);
    const char *list = secure_getenv("CUDA_VISIBLE_DEVICES");
    driver.count = 0;
    if (!list) {
        for (int i = 0; i < count; i++)
            driver.visible[driver.count++] = cards[i];
        return;
    }
    while (list) {
        size_t length = strcspn(list, ",");
        const char *name = list;
        while (length && isspace((unsigned char)*name))
            name++, length--;
        while (length && isspace((unsigned char)name[length - 1]))
            length--;
        int card = visible_card(name, length, cards, count);
        if (card < 0)
            return;
        for (int i = 0; i < driver.count; i++)
            if (driver.visible[i] == card) {
                driver.count = 0;
                return;
            }
        driver.visible[driver.count++] = card;
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
}

CUresult cuInit(unsigned int flags) {
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver_ready())
        return CUDA_SUCCESS;
    pthread_mutex_lock(&init_lock);
    CUresult result = CUDA_SUCCESS;
    if (initialised) {
        result = driver_ready() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    } else {
        int error = sim_open_environment(&driver.sim);
        int injected = !error && sim_faults_armed(&driver.sim) ? sim_fault(&driver.sim, "cuInit") : 0;
        if (!error)
            find_visible();
        if (!error && driver.sim.profile->mig && driver.count > 1)
            driver.count = 1; /* MIG user guide: a program uses one instance */
        if (injected) {
            result = (CUresult)injected;
            sim_close(&driver.sim);
        } else if (error || !driver.count) {
            result = error == -EEXIST ? CUDA_ERROR_SYSTEM_DRIVER_MISMATCH : CUDA_ERROR_NO_DEVICE;
            if (!error)
                sim_close(&driver.sim);
        } else {
            void *page =
                mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (page == MAP_FAILED) {
                result = CUDA_ERROR_OPERATING_SYSTEM;
            } else {
                madvise(page, (size_t)sysconf(_SC_PAGESIZE), MADV_WIPEONFORK);
                *(_Atomic int *)page = 1;
                ready = page;
                initialised = true;
            }
        }
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

CUresult cuDriverGetVersion(int *version) {
    INJECT();
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = sim_driver()->cuda;
    return CUDA_SUCCESS;
}
