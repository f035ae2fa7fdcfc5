/* Memory that comes from elsewhere: of other processes (IPC), of other interfaces, by shareable handles, and what is
 * bound to several cards. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "handles.h"

#define POSTED 8u

/* Seen by this process and by all helpers: how they tell each other what they export. */
static struct {
    _Atomic uint64_t words[POSTED][CU_IPC_HANDLE_SIZE / 8];
    _Atomic uint64_t files[POSTED]; /* an exported block: process and descriptor */
    atomic_bool crossed;
} *board;

void shared_prepare(void) {
    void *memory = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    board = memory == MAP_FAILED ? NULL : memory;
}

void shared_begin(void) {
    for (unsigned i = 0; board && i < POSTED; i++)
        atomic_store(&board->files[i], 0);
    if (board)
        atomic_store(&board->crossed, false);
}

bool imports_crossed(void) {
    return board && atomic_load(&board->crossed);
}

static void post(unsigned place, const CUipcMemHandle *handle) {
    uint64_t words[CU_IPC_HANDLE_SIZE / 8];
    memcpy(words, handle, sizeof words);
    for (unsigned i = 0; board && i < sizeof words / sizeof *words; i++)
        atomic_store(&board->words[place % POSTED][i], words[i]);
}

/* May be of two handles when another process posts meanwhile: then it is no handle of anything. */
static CUipcMemHandle posted(unsigned place) {
    uint64_t words[CU_IPC_HANDLE_SIZE / 8] = {0};
    CUipcMemHandle handle;
    for (unsigned i = 0; board && i < sizeof words / sizeof *words; i++)
        words[i] = atomic_load(&board->words[place % POSTED][i]);
    memcpy(&handle, words, sizeof handle);
    return handle;
}

/* What an importer opens must never be charged to it, however it ends. */
CUresult ipc(struct operation op) {
    CUipcMemHandle handle = posted(op.b);
    CUdeviceptr pointer = handle_of(IMPORTED, op.a);
    CUresult result;
    switch (op.c % 4u) {
    case 0:
        result = cuIpcGetMemHandle(op.c >= 252 ? NULL : &handle, handle_of(POINTER, op.a));
        if (result == CUDA_SUCCESS)
            post(op.b, &handle);
        return result;
    case 1:
    case 2:
        result = op.c & 4 ? cuIpcOpenMemHandle(&pointer, handle, op.c >> 3 & 1 ? 1 : 1u + (op.c == 254))
                          : cuIpcOpenMemHandle_v2(&pointer, handle, 1);
        if (result == CUDA_SUCCESS)
            made(IMPORTED, op.a, pointer, 0);
        return result;
    default: return op.c >= 250 ? cuMemFree_v2(pointer) : cuIpcCloseMemHandle(pointer);
    }
}

CUresult external(struct operation op) {
    CUexternalMemory memory = (CUexternalMemory)handle_of(EXTERNAL, op.a < 250 ? op.a % 8u : op.a);
    CUdeviceptr pointer = 0;
    CUresult result;
    if (op.c % 4u == 3)
        return cuDestroyExternalMemory(memory);
    if (op.c % 4u == 2) {
        CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = {
            .size = (uint64_t)(op.b % 64u) << 14, .offset = op.c & 8 ? MIB : 0, .flags = op.c >= 250};
        result = cuExternalMemoryGetMappedBuffer(op.c >= 252 ? NULL : &pointer, memory, &buffer);
        return keep_pointer(result, op.b, &pointer);
    }
    uint64_t bytes = bytes_of(op.b, card_here());
    int file = memfd_create("external", MFD_CLOEXEC);
    if (file >= 0 && bytes < UINT64_C(1) << 36 && ftruncate(file, (off_t)bytes) != 0)
        bytes = 0;
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC description = {.type = op.c >= 250 ? CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP
                                                                        : CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                                    .handle.fd = file,
                                                    .size = bytes};
    result = cuImportExternalMemory(op.c == 248 ? NULL : &memory, op.c == 249 ? NULL : &description);
    if (result == CUDA_SUCCESS)
        made(EXTERNAL, op.a % 8u, (uintptr_t)memory, 0);
    else if (file >= 0)
        close(file); /* the driver has what it imported */
    return result;
}

void close_exported(void) {
    for (unsigned i = 0; i < logged(DESCRIPTOR); i++) {
        if (logs[DESCRIPTOR].handle[i])
            close((int)logs[DESCRIPTOR].handle[i] - 1);
        logs[DESCRIPTOR].handle[i] = 0;
    }
}

/* Lets other processes have a block: its descriptor stays open for them. */
static CUresult export(CUmemGenericAllocationHandle block, unsigned place) {
    int file = -1;
    CUresult result = cuMemExportToShareableHandle(&file, block, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS)
        return result;
    made(DESCRIPTOR, place, (uint64_t)file + 1, 0);
    if (board) {
        atomic_store(&board->crossed, true); /* the open descriptor is charged when nobody holds the block any more */
        atomic_store(&board->files[place % POSTED], (uint64_t)getpid() << 32 | (uint64_t)file);
    }
    return result;
}

/* May be of this process, and then it is one more handle of what it holds. */
static CUresult import(CUmemGenericAllocationHandle *block, unsigned place) {
    char path[64];
    uint64_t posted_file = board ? atomic_load(&board->files[place % POSTED]) : 0;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)(posted_file >> 32), (int)(posted_file & UINT32_MAX));
    int file = posted_file ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (board && file >= 0 && ((pid_t)(posted_file >> 32) != getpid() || concurrent))
        atomic_store(&board->crossed, true); /* before anything is charged: a comparison may be under way */
    CUresult result =
        cuMemImportFromShareableHandle(block, (void *)(intptr_t)file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (file >= 0)
        close(file);
    return result;
}

/* A block by way of a file descriptor: in one process one more handle of the same block, in another its importer's own.
 */
CUresult shareable(struct operation op) {
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = op.c & 4 ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (op.c >> 3) % (DEVICES + 1)}};
    CUmemGenericAllocationHandle handle = handle_of(PHYSICAL, op.a < 250 ? op.a % 16u : op.a);
    CUresult result;
    int file = -1;
    if (op.c & 1) {
        result = cuMemCreate(&handle, granules(op.b), &properties, 0);
    } else if (op.c >= 64 && op.c < 160) {
        return export(handle, op.b);
    } else if (op.c >= 160 && op.c < 248) {
        result = import(&handle, op.a);
    } else {
        /* another thread may let go of the block in between: then it is a new one for this process */
        if (board && concurrent)
            atomic_store(&board->crossed, true);
        result = cuMemExportToShareableHandle(op.c >= 250 ? NULL : &file, handle,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result == CUDA_SUCCESS)
            result = cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)file,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (file >= 0)
            close(file);
    }
    if (result == CUDA_SUCCESS)
        made(PHYSICAL, op.b % 16u, handle, 0);
    return result;
}

/* One address for the memory of several cards: what is bound stays on its card until it is unbound. */
CUresult multicast(struct operation op) {
    CUmemGenericAllocationHandle object = handle_of(MULTICAST, op.a < 250 ? op.a % 4u : op.a);
    CUmulticastObjectProp properties = {.numDevices = 1 + (op.b & 1), .size = granules(op.b), .flags = op.c == 255};
    CUmemGenericAllocationHandle block = handle_of(PHYSICAL, op.b < 250 ? op.b % 16u : op.b);
    CUdeviceptr address = handle_of(RANGE, op.b % 8u) + (uint64_t)(op.c >> 5) * GRANULE;
    uint64_t offset = (uint64_t)(op.c >> 4) % 4 * GRANULE;
    CUresult result;
    switch (op.c % 8u) {
    case 0:
        result = cuMulticastCreate(op.c == 248 ? NULL : &object, &properties);
        if (result == CUDA_SUCCESS)
            made(MULTICAST, op.a % 4u, object, 0);
        return result;
    case 1:
    case 2: return cuMulticastAddDevice(object, op.b % (DEVICES + 1));
    case 3: return cuMulticastBindMem(object, offset, block, 0, GRANULE, op.c == 251);
    case 4: return cuMulticastBindMem_v2(object, op.a % (DEVICES + 1), offset, block, 0, GRANULE, 0);
    case 5:
        return op.c & 8 ? cuMulticastBindAddr(object, offset, address, GRANULE, 0)
                        : cuMulticastBindAddr_v2(object, op.a % (DEVICES + 1), offset, address, GRANULE, 0);
    case 6: return cuMulticastUnbind(object, op.b % (DEVICES + 1), offset, (1 + op.b % 4u) * GRANULE);
    default: return op.b & 1 ? cuMemRelease(object) : cuMemMap(address, GRANULE, 0, object, 0);
    }
}
