/* Context-local storage: values that a library keeps for a context, with the library's own function to end them. A
 * table of cuGetExportTable.
 *
 * The signatures are ZLUDA's (dark_api/src/lib.rs, "context_local_storage_interface_v0301"). The errors are those by
 * which the runtimes 11.8 to 13.5 start a context at first need. First, get returns 709 (a primary context that is not
 * active), and the runtime retains the context. Then get returns 400 (nothing kept), the runtime calls put, and get
 * succeeds. */
#include <stdlib.h>

#include "cuda/driver.h"
#include "cuda/export_tables.h"

typedef void destroy_function(CUcontext context, void *key, void *value);
struct kept {
    CUcontext context;
    void *key, *value;
    destroy_function *destroy;
    struct kept *next;
};
static struct kept *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The context that a call names, or the current context for NULL; for a green context, its primary context. */
static CUresult named(CUcontext handle, CUcontext *out) {
    if (!handle)
        return current_context(out);
    if (!driver_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!object_is(handle, OBJECT_CONTEXT))
        return object_is(handle, OBJECT_PRIMARY_WAITING) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    *out = handle->green ? handle->base : handle;
    return CUDA_SUCCESS;
}

/* With the lock held. The link to the value, or the place for a new link. */
static struct kept **find(CUcontext context, const void *key) {
    struct kept **at = &all;
    while (*at && ((*at)->context != context || (*at)->key != key))
        at = &(*at)->next;
    return at;
}

static struct kept *take(struct kept **at) {
    struct kept *one = *at;
    if (one)
        *at = one->next;
    return one;
}

static CUresult put(CUcontext handle, void *key, void *value, destroy_function *destroy) {
    CUcontext context;
    CUresult result = named(handle, &context);
    struct kept *one = result ? NULL : malloc(sizeof *one);
    if (!one)
        return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    struct kept *old = take(find(context, key));
    *one = (struct kept){context, key, value, destroy, all};
    all = one;
    pthread_mutex_unlock(&lock);
    free(old);
    return CUDA_SUCCESS;
}

static CUresult delete(CUcontext handle, void *key) {
    CUcontext context;
    CUresult result = named(handle, &context);
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    struct kept *old = take(find(context, key));
    pthread_mutex_unlock(&lock);
    free(old);
    return old ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult get(void **value, CUcontext handle, void *key) {
    CUcontext context;
    CUresult result = named(handle, &context);
    if (result || !value)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct kept *one = *find(context, key);
    if (one)
        *value = one->value;
    pthread_mutex_unlock(&lock);
    return one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* NULL: no value is left. */
static struct kept *take_any(CUcontext context) {
    pthread_mutex_lock(&lock);
    struct kept **at = &all;
    while (*at && (*at)->context != context)
        at = &(*at)->next;
    struct kept *one = take(at);
    pthread_mutex_unlock(&lock);
    return one;
}

void storage_end(CUcontext context) {
    for (struct kept *one; (one = take_any(context)); free(one))
        if (one->destroy)
            one->destroy(context, one->key, one->value);
}

void storage_forget(CUcontext context) {
    for (struct kept *one; (one = take_any(context));)
        free(one);
}

/* This table has no size: it ends with NULL. Seen: every runtime calls all three, and get before nearly every call. */
const void *const storage_table[4] = {(void *)put, (void *)delete, (void *)get, NULL};
