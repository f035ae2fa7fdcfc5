/* Handles. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/driver.h"

#define SLOT 512
#define ARENA (1ull << 30)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *arena;
static size_t end;
static struct object *free_list;

_Static_assert(sizeof(struct CUctx_st) <= SLOT && sizeof(struct CUlib_st) <= SLOT &&
                   sizeof(struct CUmipmappedArray_st) <= SLOT,
               "slot too small");

void *object_new(enum object_type type) {
    pthread_mutex_lock(&lock);
    if (!arena) {
        void *map = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arena = map == MAP_FAILED ? NULL : map;
    }
    struct object *object = free_list;
    if (object)
        free_list = object->next_free;
    else if (arena && end + SLOT <= ARENA)
        object = (struct object *)(arena + __atomic_fetch_add(&end, SLOT, __ATOMIC_RELEASE));
    if (object) {
        memset(&object->next_free, 0, SLOT - offsetof(struct object, next_free));
        __atomic_store_n(&object->type, type, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return object;
}

void object_made(void *handle, enum object_type type) {
    struct object *object = handle;
    __atomic_store_n(&object->type, type, __ATOMIC_RELEASE);
}

void object_free(void *handle) {
    struct object *object = handle;
    pthread_mutex_lock(&lock);
    __atomic_store_n(&object->type, OBJECT_FREE, __ATOMIC_RELEASE);
    object->next_free = free_list;
    free_list = object;
    pthread_mutex_unlock(&lock);
}

static uint32_t type_of(const void *object) {
    return __atomic_load_n(&((const struct object *)object)->type, __ATOMIC_ACQUIRE);
}

bool object_is(const void *handle, enum object_type type) {
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)arena;
    return arena && offset < __atomic_load_n(&end, __ATOMIC_ACQUIRE) && offset % SLOT == 0 && type_of(handle) == type;
}

void object_each(enum object_type type, void (*visit)(void *object, void *argument), void *argument) {
    size_t last = __atomic_load_n(&end, __ATOMIC_ACQUIRE);
    for (size_t offset = 0; offset < last; offset += SLOT)
        if (type_of(arena + offset) == type)
            visit(arena + offset, argument);
}
