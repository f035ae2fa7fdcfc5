/* Memory of another interface (Vulkan, a video encoder), imported as a file descriptor. The importing process pays for
 * it until the object and all its buffers are gone: no other process of this simulator accounts for it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"

struct CUextMemory_st {
    struct object object;
    CUcontext context;
    int card;
    uint64_t size;
    char *contents;
    unsigned references; /* the object itself and its buffers */
    bool destroyed;
};

/* With driver.lock held. */
static void drop(CUexternalMemory memory) {
    if (--memory->references)
        return;
    munmap(memory->contents, memory->size);
    uncharge(memory->card, memory->size);
    object_free(memory);
}

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    ENTER_CONTEXT(context);
    struct stat st;
    if (!out || !description || !description->size || description->flags & ~(unsigned)CUDA_EXTERNAL_MEMORY_DEDICATED)
        return CUDA_ERROR_INVALID_VALUE;
    if (description->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        return CUDA_ERROR_NOT_SUPPORTED; /* the other types belong to Windows and to NvSciBuf */
    int fd = description->handle.fd;
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < description->size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = charge(context->card, description->size);
    if (result)
        return result;
    char *contents = shared_map(fd, 0, description->size);
    CUexternalMemory memory = contents ? object_new(OBJECT_EXTERNAL) : NULL;
    if (!memory) {
        if (contents)
            munmap(contents, description->size);
        uncharge(context->card, description->size);
        return contents ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    }
    memory->context = context;
    memory->card = context->card;
    memory->size = description->size;
    memory->contents = contents;
    memory->references = 1;
    close(fd); /* the driver owns an imported descriptor */
    *out = memory;
    return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *buffer) {
    ENTER_CONTEXT(context);
    if (!out || !buffer || !buffer->size || buffer->flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result =
        object_is(memory, OBJECT_EXTERNAL) && !memory->destroyed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (!result && (buffer->offset > memory->size || buffer->size > memory->size - buffer->offset))
        result = CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr address = result ? 0 : block_new(buffer->size, context, BLOCK_EXTERNAL, memory);
    if (address) {
        memory->references++;
        block_contents(address, memory->contents + buffer->offset);
        *out = address;
    } else if (!result) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

void external_release(const struct block *block) {
    pthread_mutex_lock(&driver.lock);
    drop(block->owner);
    pthread_mutex_unlock(&driver.lock);
}

static void destroy(void *handle, void *context) {
    CUexternalMemory memory = handle;
    if (memory->context == context && !memory->destroyed) {
        memory->destroyed = true;
        drop(memory);
    }
}

void external_of_context_drop(CUcontext context) {
    pthread_mutex_lock(&driver.lock);
    object_each(OBJECT_EXTERNAL, destroy, context);
    pthread_mutex_unlock(&driver.lock);
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    ENTER();
    pthread_mutex_lock(&driver.lock);
    CUresult result =
        object_is(memory, OBJECT_EXTERNAL) && !memory->destroyed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (!result) {
        memory->destroyed = true;
        drop(memory);
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}
