/* Allocates and frees at random, in all ways, and looks whether contents stay what they were.
 *
 *   tier_storm SEED OPERATIONS    OPERATIONS 0: until killed, with a new context now and then
 *
 * Says "begun" when it has a context and waits for a line, if it is to end. At the end says "done OPERATIONS refused N"
 * and waits for a line, with what it then holds. Exit 1 at the first wrong byte or answer. */
#define _GNU_SOURCE
#include <cuda.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define HELD 24
#define MIB (1u << 20)
#define MARK 4096

enum kind { NOTHING, LINEAR, PITCHED, ORDERED, PHYSICAL };

static struct held {
    enum kind kind;
    CUdeviceptr pointer;
    CUmemGenericAllocationHandle handle;
    uint64_t bytes;
    unsigned char mark;
} held[HELD];

static uint64_t state;
static CUstream stream;

static uint64_t chance(uint64_t below) {
    state ^= state << 13; /* xorshift64 (Marsaglia 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

static void need(bool good, const char *what, long value) {
    if (good)
        return;
    fprintf(stderr, "%s: %ld\n", what, value);
    exit(1);
}

static void must(CUresult result, const char *what) {
    need(result == CUDA_SUCCESS, what, result);
}

/* The first and the last bytes of a block carry its mark. */
static void write_marks(const struct held *one) {
    const uint64_t length = one->bytes < MARK ? one->bytes : MARK;
    must(cuMemsetD8(one->pointer, one->mark, length), "cuMemsetD8");
    must(cuMemsetD8(one->pointer + one->bytes - length, one->mark, length), "cuMemsetD8 of the end");
}

static void read_marks(const struct held *one) {
    static unsigned char bytes[MARK];
    const uint64_t length = one->bytes < MARK ? one->bytes : MARK;
    for (unsigned end = 0; end < 2; end++) {
        must(cuMemcpyDtoH(bytes, end ? one->pointer + one->bytes - length : one->pointer, length), "cuMemcpyDtoH");
        for (uint64_t i = 0; i < length; i++)
            need(bytes[i] == one->mark, "a byte is wrong, of kind", one->kind);
    }
}

static void look(const struct held *one) {
    unsigned type = 0;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    const uint64_t offset = chance(one->bytes);
    must(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, one->pointer + offset),
         "cuPointerGetAttribute");
    need(type == CU_MEMORYTYPE_DEVICE, "not of the card, of kind", one->kind);
    must(cuMemGetAddressRange(&base, &bytes, one->pointer + offset), "cuMemGetAddressRange");
    need(base == one->pointer && bytes >= one->bytes, "another range, of kind", one->kind);
}

static CUresult make_physical(struct held *one) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}}};
    const CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    one->bytes = (one->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    const CUresult result = cuMemCreate(&one->handle, one->bytes, &properties, 0);
    if (result != CUDA_SUCCESS)
        return result;
    must(cuMemAddressReserve(&one->pointer, one->bytes, 0, 0, 0), "cuMemAddressReserve");
    must(cuMemMap(one->pointer, one->bytes, 0, one->handle, 0), "cuMemMap");
    must(cuMemSetAccess(one->pointer, one->bytes, &access, 1), "cuMemSetAccess");
    return CUDA_SUCCESS;
}

static CUresult make(struct held *one) {
    size_t pitch = 0;
    CUresult result;
    one->kind = (enum kind)(LINEAR + chance(4));
    one->bytes = chance(4) ? 1 + chance(48 * MIB) : 1 + chance(2 * MIB);
    one->mark = (unsigned char)chance(256);
    if (one->kind == LINEAR) {
        result = cuMemAlloc(&one->pointer, one->bytes);
    } else if (one->kind == PITCHED) {
        result = cuMemAllocPitch(&one->pointer, &pitch, 1 + chance(MIB), 1 + chance(32), 16);
        one->bytes = pitch;
    } else if (one->kind == ORDERED) {
        result = cuMemAllocAsync(&one->pointer, one->bytes, stream);
        if (result == CUDA_SUCCESS)
            must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    } else {
        result = make_physical(one);
    }
    if (result == CUDA_SUCCESS)
        write_marks(one);
    else
        one->kind = NOTHING;
    return result;
}

static void end(struct held *one) {
    read_marks(one);
    look(one);
    if (one->kind == PHYSICAL) {
        must(cuMemUnmap(one->pointer, one->bytes), "cuMemUnmap");
        must(cuMemAddressFree(one->pointer, one->bytes), "cuMemAddressFree");
        must(cuMemRelease(one->handle), "cuMemRelease");
    } else if (chance(2)) {
        must(cuMemFreeAsync(one->pointer, stream), "cuMemFreeAsync");
    } else {
        must(cuMemFree(one->pointer), "cuMemFree");
    }
    one->kind = NOTHING;
}

static void begin(CUcontext *context) {
    CUresult result;
    while ((result = cuCtxCreate(context, NULL, 0, 0)) == CUDA_ERROR_OUT_OF_MEMORY)
        ; /* others hold the guarantee */
    must(result, "cuCtxCreate");
    must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

/* All of the context's own memory goes with it. */
static void renew(CUcontext *context) {
    for (unsigned i = 0; i < HELD; i++)
        if (held[i].kind == PHYSICAL)
            end(&held[i]);
    must(cuCtxDestroy(*context), "cuCtxDestroy");
    memset(held, 0, sizeof held);
    begin(context);
}

int main(int count, char **arguments) {
    need(count == 3, "arguments", count);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    state = strtoull(arguments[1], NULL, 10) * 0x9e3779b97f4a7c15ull + 1;
    const uint64_t operations = strtoull(arguments[2], NULL, 10);
    uint64_t refused = 0;
    CUcontext context;
    must(cuInit(0), "cuInit");
    begin(&context);
    if (operations) {
        puts("begun");
        fflush(stdout);
        getchar();
    }
    for (uint64_t i = 0; operations == 0 || i < operations; i++) {
        struct held *one = &held[chance(HELD)];
        if (operations == 0 && chance(2000) == 0)
            renew(&context);
        else if (one->kind != NOTHING)
            end(one);
        else
            refused += make(one) != CUDA_SUCCESS;
    }
    size_t free_bytes, total;
    CUmemoryPool pool;
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    must(cuDeviceGetDefaultMemPool(&pool, 0), "cuDeviceGetDefaultMemPool");
    must(cuMemPoolTrimTo(pool, 0), "cuMemPoolTrimTo");
    must(cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo"); /* what was freed in order is given back */
    printf("done %llu refused %llu\n", (unsigned long long)operations, (unsigned long long)refused);
    fflush(stdout);
    getchar();
    return 0;
}
