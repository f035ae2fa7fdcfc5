/* What the sources of the simulated libcuda share. */
#ifndef VGPU_SIMULATOR_DRIVER_H
#define VGPU_SIMULATOR_DRIVER_H
#define __CUDA_API_VERSION_INTERNAL /* declares every version of every entry point under its own symbol */
#pragma GCC visibility push(default)
#include <cuda.h>
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device); /* of CUDA 9.2; cuda.h declares its successor alone */
/* cudaProfiler.h, which no wheel has; `mode` is an enumeration there */
CUresult cuProfilerInitialize(const char *config, const char *output, int mode);
CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);
#pragma GCC visibility pop
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/state.h"

#define MIB (1ull << 20)
/* of a block, on every board */
#define MAX_THREADS 1024
#define DEFAULT_SHARED 49152
#define DEVICE_WINDOW (1ull << 48) /* device addresses lie above everything that a host program can map */
#define RESERVATION_WINDOW (DEVICE_WINDOW + (1ull << 47))
#define WINDOW_END (1ull << 49)

enum object_type {
    OBJECT_FREE,
    OBJECT_CONTEXT,
    OBJECT_STREAM,
    OBJECT_EVENT,
    OBJECT_MODULE,
    OBJECT_FUNCTION,
    OBJECT_LIBRARY,
    OBJECT_KERNEL,
    OBJECT_ARRAY,
    OBJECT_MIPMAP,
    OBJECT_POOL,
    OBJECT_POOL_LEAVING,
    OBJECT_PHYSICAL,
    OBJECT_GRAPH,
    OBJECT_NODE,
    OBJECT_GRAPH_EXEC,
    OBJECT_EXTERNAL,
    OBJECT_GREEN,
    OBJECT_DESCRIPTOR,
    OBJECT_PRIMARY_WAITING, /* the handle of a primary context that is not active */
    OBJECT_UNFINISHED
};
struct object {
    uint32_t type, reserved;
    struct object *next_free;
};
/* Handles live in an arena of their own, so that any value a program passes can be checked, also one that was
 * destroyed. */
void *object_new(enum object_type type);
/* For OBJECT_UNFINISHED, when all is filled in: a thread may still use the handle of what had this place before, such
 * as its current context. */
void object_made(void *object, enum object_type type);
void object_free(void *object);
bool object_is(const void *handle, enum object_type type);
/* Calls visit for every live object of a type. */
void object_each(enum object_type type, void (*visit)(void *object, void *argument), void *argument);

struct capture;
struct CUstream_st {
    struct object object;
    CUcontext context;
    unsigned flags;
    int priority;
    _Atomic uint64_t last;       /* sequence of the last launch; 0: none */
    _Atomic uint64_t waits;      /* it waits for all up to this one */
    _Atomic uint64_t not_before; /* set by waits for work of another card, and by copies */
    /* when its last kernel ends if nobody else has the card; kept where copies take time */
    _Atomic uint64_t planned;
    uint64_t host; /* ticket of its last host function */
    uint64_t id;
    struct capture *capture;
    unsigned member;  /* of the capture's streams */
    uint64_t owner;   /* the thread whose CU_STREAM_PER_THREAD it is; 0: a stream like any other */
    CUgreenCtx green; /* that it was made for; NULL: none */
    bool detached;    /* that has been destroyed */
};

struct CUctx_st {
    struct object object;
    int device, card;
    unsigned flags, api_version;
    bool primary, dead;
    unsigned references; /* of a primary context */
    uint64_t id;
    uint64_t host;           /* ticket of the last host function of any stream */
    _Atomic unsigned failed; /* the error of a kernel, which every later call answers */
    /* as of a stream: over all streams, and over those that wait for the legacy stream */
    _Atomic uint64_t copied, copied_blocking, planned_blocking;
    /* sequences over all streams, and over those that wait for the legacy stream */
    _Atomic uint64_t last, last_blocking;
    struct CUstream_st *legacy;
    size_t limits[8];
    CUfunc_cache cache;
    uint32_t peers;                      /* a bit for each ordinal whose memory it may use */
    _Atomic uint64_t waits, waits_until; /* as of a stream: of all streams */
    CUgreenCtx green;                    /* NULL: not the handle of a green context */
    CUcontext base; /* of such a handle: the primary context, to which everything belongs that is made in it */
};

/* A green context: a part of a primary context with multiprocessors of its own, and its handle as a CUcontext. */
struct CUgreenCtx_st {
    struct object object;
    CUcontext handle;
    CUdevResource resource;
    uint64_t id;
    struct CUstream_st *legacy;
    _Atomic uint64_t last, waits, waits_until; /* as of a context */
};

struct CUevent_st {
    struct object object;
    CUcontext context; /* NULL: destroyed; the event may still be */
    int card;
    unsigned flags;
    enum { EVENT_FRESH, EVENT_PENDING, EVENT_DONE } state;
    struct sim_mark mark;
    uint64_t recorded, time, host, not_before, planned;
    struct CUevent_st *next_pending;
    struct capture *capture;
    size_t record; /* of the capture's events */
};

struct CUmod_st {
    struct object object;
    CUcontext context;
    uint64_t bytes;
    struct CUlib_st *library;
    CUfunction *functions;
    unsigned count;
    struct variable *variables;
    bool opaque; /* an image whose names cannot all be read: every name is a function, and a variable */
};

#define DURATIONS 8
struct duration {           /* of a kernel's launches, from its name */
    uint64_t ns[DURATIONS]; /* in turn; of a launch, or of one block */
    unsigned count;
    bool per_block;
    uint32_t meets;         /* on so many cards its launches wait for each other; 0: they do not */
    uint64_t name;          /* of those that meet */
    uint64_t argument_unit; /* ns per unit of the first parameter; 0: it says nothing */
    uint32_t *factors;      /* of a log-normal distribution; NULL: none */
    uint64_t key;
    _Atomic uint64_t calls;
};

#define MAX_PARAMETERS 64
#define MAX_POINTERS 16
enum touch { TOUCH_NOTHING, TOUCH_FILL, TOUCH_ADD, TOUCH_COPY, TOUCH_SUM };
struct CUfunc_st {
    struct object object;
    CUmodule module;
    char *name;
    struct duration duration;
    enum touch touch;    /* what its launches do to memory, by its name */
    _Atomic bool loaded; /* its code */
    bool retrieved;      /* by its name, not only enumerated */
    unsigned part;       /* of a block that they touch, in percent */
    int dynamic_shared, carveout, parameters, clusters[5];
    uint16_t *parameter_sizes;
};

struct CUlib_st {
    struct object object;
    char *image;
    struct CUkern_st **kernels;
    unsigned count;
    CUmodule *modules; /* one of each context that has used it */
    unsigned module_count;
};

struct CUkern_st {
    struct object object;
    CUlibrary library;
    char *name;
};

struct CUarray_st {
    struct object object;
    CUcontext context;
    CUDA_ARRAY3D_DESCRIPTOR descriptor;
    uint64_t bytes;
    size_t pitch, rows;
    char *contents;
    bool level; /* of a mipmapped array, which owns the memory */
};

struct CUmipmappedArray_st {
    struct object object;
    CUcontext context;
    uint64_t bytes;
    unsigned count;
    CUarray levels[16];
};

struct CUmemPoolHandle_st {
    struct object object;
    int device, card;
    bool is_default;
    uint64_t used, used_high, reserved, reserved_high, threshold, maximum;
    CUmemAllocationHandleType handle_types;
    uint32_t readers, writers; /* a bit for each other ordinal that may use it so */
    int reuse[3];
    pthread_mutex_t lock;
};

/* Physical memory of cuMemCreate. */
struct physical {
    struct object object;
    CUmemAllocationProp properties;
    int card;    /* -1: host */
    int account; /* the card for which host memory is counted */
    uint64_t size;
    unsigned references; /* handles + mappings */
    unsigned handles;
    char *contents;
    struct shareable *shareable; /* NULL: no other process can have it */
    int fd;                      /* of its file then */
    struct multicast *multicast; /* of a multicast object, which has no contents */
};

enum block_kind { BLOCK_DEVICE, BLOCK_POOL, BLOCK_GRAPH, BLOCK_EXTERNAL, BLOCK_IMPORTED, BLOCK_VARIABLE };
struct block {
    uint64_t size, id;
    CUcontext context;
    void *owner;    /* the pool of BLOCK_POOL, the external memory of BLOCK_EXTERNAL, which has the contents */
    char *contents; /* made when first touched: memory that nobody wrote costs no host memory */
    uint32_t next_free;
    uint8_t live, kind;
    bool shared : 1;      /* exported by cuIpcGetMemHandle */
    bool synchronous : 1; /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
    bool absent;          /* of a graph's memory while no launch has made it */
};

enum range_kind { RANGE_HOST, RANGE_REGISTERED, RANGE_MANAGED, RANGE_RESERVED, RANGE_MAPPED };
struct range {
    uint64_t base, size, id;
    enum range_kind kind;
    unsigned flags;
    CUcontext context;
    struct physical *physical; /* of a mapping, from `offset` */
    uint64_t offset;
    uint32_t readers, writers; /* of a mapping: a bit for each ordinal that may use it so, and one for the host */
    struct {                   /* of a mapping: the last launch that names it, and when the last copy ends */
        CUcontext context;
        uint64_t launch, copied;
    } use;
    struct managed *managed; /* of managed memory that comes and goes */
    int card;                /* for which host memory is counted */
    bool synchronous;        /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
};

extern struct driver {
    struct sim sim;
    int visible[SIM_CARDS], count; /* cards of the ordinals */
    CUcontext primary[SIM_CARDS];  /* that are active */
    CUcontext primary_handle[SIM_CARDS];
    unsigned primary_flags[SIM_CARDS];
    CUmemoryPool default_pool[SIM_CARDS], current_pool[SIM_CARDS];
    pthread_mutex_t lock; /* contexts, modules, ranges: everything that is not hot */
    _Atomic uint64_t next_id;
    _Atomic unsigned mapped; /* mappings of physical memory */
} driver;

struct thread_state {
    CUcontext stack[64];
    int depth;
    CUstreamCaptureMode capture_mode;
    bool own_default_stream;        /* inside a call of the per-thread variant */
    int captures;                   /* begun by this thread and not relaxed */
    CUstream per_thread[SIM_CARDS]; /* the one used last on each card */
    uint64_t id;                    /* of the owner of such streams; 0: none yet */
};
struct thread_state *thread_state(void);

bool driver_ready(void);
/* Makes this process one that can hold memory; contexts and physical memory need it. */
bool driver_register(void);
uint64_t driver_id(void);
/* Whether VGPU_SIM_STRICT names a way in which drivers may be stricter. */
bool strict_about(const char *what);

/* The current context of this thread, for a green one its primary context, or the error that a call without one
 * answers. */
CUresult current_context(CUcontext *out);
static inline CUresult device_check(CUdevice device) {
    return !driver_ready()                        ? CUDA_ERROR_NOT_INITIALIZED
           : device < 0 || device >= driver.count ? CUDA_ERROR_INVALID_DEVICE
                                                  : CUDA_SUCCESS;
}
/* Where every entry point begins, by itself or in one of the forms below: the place of errors on demand. */
#define INJECT()                                                                                                       \
    do {                                                                                                               \
        if (sim_faults_armed(&driver.sim)) {                                                                           \
            int injected = sim_fault(&driver.sim, __func__);                                                           \
            if (injected)                                                                                              \
                return (CUresult)injected;                                                                             \
        }                                                                                                              \
    } while (0)
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!driver_ready())                                                                                           \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                         \
        INJECT();                                                                                                      \
    } while (0)
#define ENTER_DEVICE(device)                                                                                           \
    do {                                                                                                               \
        INJECT();                                                                                                      \
        CUresult entered = device_check(device);                                                                       \
        if (entered)                                                                                                   \
            return entered;                                                                                            \
    } while (0)
#define ENTER_CONTEXT(context)                                                                                         \
    CUcontext context;                                                                                                 \
    INJECT();                                                                                                          \
    do {                                                                                                               \
        CUresult entered = current_context(&context);                                                                  \
        if (entered)                                                                                                   \
            return entered;                                                                                            \
    } while (0)

/* -ENOMEM and the like as CUDA says it. */
CUresult charge(int card, uint64_t bytes);
/* The card that host memory made now is there for: that of the current context, else the first visible one. */
int host_account(void);
void uncharge(int card, uint64_t bytes);

/* blocks.c: device memory by address */
CUdeviceptr block_new(uint64_t size, CUcontext context, enum block_kind kind, void *owner);
/* Gives a new block contents that are mapped already. */
void block_contents(CUdeviceptr base, char *contents);
/* The live block that holds an address, with its base; NULL: none. */
struct block *block_find(CUdeviceptr address, CUdeviceptr *base);
/* The block of a graph's allocation that begins at an address, with or without memory now; NULL: none. */
struct block *block_of_graph(CUdeviceptr address);
/* Takes a block out if `address` is the base of a live one of at most the kind `last`; its fields are copied to `out`.
 */
bool block_take(CUdeviceptr address, enum block_kind last, struct block *out);
/* Frees every block for which match says so, telling visit about each. */
void block_each(bool (*match)(const struct block *, void *), void (*visit)(const struct block *, void *),
                void *argument);

/* ranges.c: host, managed and mapped memory, ordered by address; under driver.lock */
struct range *range_find(uint64_t address, bool reserved);
struct range *range_add(const struct range *range);
void range_remove(struct range *range);
struct range *range_overlap(uint64_t base, uint64_t size, bool reserved);
void range_each(bool (*match)(const struct range *, void *), void (*drop)(const struct range *, void *),
                void *argument);

/* Host address of up to `size` bytes of any memory a program may name; *length says how many lie in one piece.
 * `device`: the ordinal of who reads or writes it, and has to have access to mappings. */
CUresult view(int device, CUdeviceptr address, size_t size, bool writes, char **host, size_t *length);
char *zero_pages(uint64_t size);
/* The ordinals of the cards that reach the two ends of a copy: that of its stream, or those of the contexts that the
 * call names. */
struct sides {
    int to, from;
};

/* shared.c: contents that other processes see */
int shared_memory_file(const char *name);
char *shared_map(int fd, uint64_t offset, uint64_t size);
/* Makes *contents (NULL: none yet) part of a file, from `offset`, without moving them in this address space. */
bool shared_move(int fd, uint64_t offset, char **contents, uint64_t size);

/* graph_memory.c */
void graph_memory_release(const struct block *block);
void graph_memory_trim(int card);

/* ipc.c */
void ipc_forget(const struct block *block);
/* The card of imported memory. */
int ipc_card(CUdeviceptr base);
void imports_of_context_drop(CUcontext context);

/* external.c */
void external_release(const struct block *block);
/* Destroys the external memory that was imported into a context; what was mapped from it goes with the context's
 * blocks. */
void external_of_context_drop(CUcontext context);

/* virtual.c: under driver.lock; NULL: no handle of physical memory */
struct physical *physical_of(CUmemGenericAllocationHandle handle);
void physical_drop(struct physical *physical);
bool host_memory_is_physical(void); /* cuMemCreate makes host memory */
/* What the card of an ordinal (-1: the host) may do with a mapping; under driver.lock. */
CUmemAccess_flags access_of(const struct range *range, int device);

/* multicast.c */
bool multicast_supported(const struct sim_profile *profile, uint32_t cards);
void multicast_free(struct multicast *multicast);

/* shareable.c */
bool shareable_leave(struct physical *physical);
void shareable_adopt(void);

/* pools.c */
CUresult pool_release(struct block *block);
void pools_trim(int card);
CUresult pool_default(int device, CUmemoryPool *out);

/* pointers.c: what is known about an address */
struct place {
    CUdeviceptr base; /* of the allocation, or of the reserved range around a mapping */
    uint64_t size, id;
    CUdeviceptr mapping; /* of VMM memory; no size: reserved, nothing mapped */
    uint64_t mapping_size;
    CUcontext context;
    CUmemoryPool pool;
    unsigned flags, handle_types;
    int card;
    CUmemAccess_flags access;
    bool known, host, managed, virtual, imported, synchronous;
};
struct place place_of(CUdeviceptr address);

/* context.c */
CUresult context_make(int device, unsigned flags, bool primary, unsigned api_version, CUcontext *out);
/* The handle of a device's primary context, which is the same before, in and between its lives; NULL: no room. */
CUcontext context_primary(int device);
/* storage.c: runs what libraries want to run before a context goes, without any lock; and, when it goes, forgets what
 * was put meanwhile */
void storage_end(CUcontext context);
void storage_forget(CUcontext context);
/* memory.c: cuMemFree wherever it is called from; frees the host and managed memory of a context */
CUresult memory_free(CUdeviceptr address);
void ranges_of_context_drop(CUcontext context);

/* green.c */
/* The green context that is current; NULL: none. */
CUgreenCtx current_green(void);
/* A primary context goes, and its green contexts with it. */
void greens_of_context_drop(CUcontext context);
/* Waits for a context, or for a green one by its handle. */
void context_wait(CUcontext context);

/* streams.c */
CUresult stream_resolve(CUstream handle, CUstream *out);
CUstream stream_new(CUcontext context, unsigned flags, int priority);
/* Once all launches up to this sequence have ended, so has everything issued to a stream. */
uint64_t stream_last(CUstream stream);
CUresult stream_wait(CUstream stream);
struct launch_shape {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    uint64_t argument; /* its first parameter, of a function that takes its time from it */
    unsigned pointers;
    /* words of its parameters that name memory; the parameters of a function that touches memory */
    uint64_t pointer[MAX_POINTERS], operand[3];
};
CUresult stream_launch(CUstream stream, const struct launch_shape *shape);
/* What a stream has to do: the legacy stream waits for all blocking streams. */
struct sim_mark stream_mark(CUstream stream);
bool stream_ended(CUstream stream);
/* When its last kernel ends if nobody else has the card. */
uint64_t stream_planned(CUstream stream);
/* Gives the card something that takes time in a stream; 0: this process lost its place. */
uint64_t stream_occupy(CUstream stream, uint64_t duration, uint32_t width, uint32_t group);
/* Threads may launch on one stream at once. */
static inline void raise_to(_Atomic uint64_t *last, uint64_t sequence) {
    uint64_t now = atomic_load_explicit(last, memory_order_relaxed);
    while (now < sequence &&
           !atomic_compare_exchange_weak_explicit(last, &now, sequence, memory_order_relaxed, memory_order_relaxed))
        ;
}

/* events.c: events whose work has ended get their times; the second only looks further where some wait for that card */
void events_settle(void);
void events_settle_some(int card);
/* Records all up to a launch of a context. */
void event_record_all(CUevent event, CUcontext context, uint64_t last);
/* Whose words these are, as those of a stream, waits for an event. */
void event_wait_by(CUevent event, int card, _Atomic uint64_t *waits, _Atomic uint64_t *until);
/* Later work of a stream waits for what another one, of whatever card, has now to do; as far as that is known. */
void stream_follow(CUstream stream, CUstream other);
/* Work of a stream begins no earlier, besides what is launched before it. */
uint64_t stream_not_before(CUstream stream);
/* Gives time on an engine of the stream's card to a copy in stream order; returns when it ends. */
uint64_t stream_engine(CUstream stream, enum sim_engine_kind engine, uint64_t duration);
void copies_wait(CUcontext context);
/* per_thread.c: this thread's own stream of a context; NULL: no room */
CUstream stream_per_thread(CUcontext context);

/* host.c: what runs on the host in stream order; tickets count host functions */
CUresult host_launch(CUstream stream, CUhostFn function, void *data);
bool host_done(uint64_t ticket);
void host_wait(uint64_t ticket);

/* durations.c */
void duration_read(struct duration *duration, const char *name);
void duration_free(struct duration *duration);
/* Nanoseconds that the next launch takes. */
uint64_t duration_next(struct duration *duration, uint64_t blocks, uint64_t argument);
/* The first parameter, where the function's time depends on it. */
uint64_t function_argument(CUfunction function, void **params, void **extra);

/* touch.c: memory that launches touch */
void touch_name(CUfunction function);
/* Whether it matters what a launch touches. */
static inline bool touch_matters(CUfunction function) {
    return function->touch || driver.sim.timing.copies || driver.sim.timing.migrate ||
           atomic_load_explicit(&driver.mapped, memory_order_relaxed);
}
/* Keeps what a launch needs to know of its parameters. */
void touch_read(struct launch_shape *shape, void **params, void **extra);
/* Does what the kernel does; nanoseconds that it waits for memory which is not on the card. */
uint64_t touch_launch(CUcontext context, const struct launch_shape *shape);
/* Notes that a launch uses its mappings. */
void touch_note(CUcontext context, const struct launch_shape *shape, uint64_t sequence);
/* Under driver.lock: a mapping goes; whoever still uses it has failed. */
void touch_unmap(const struct range *range);
/* The memory of a kernel was not there. */
void context_fail(CUcontext context);

/* managed.c: managed memory that comes and goes; under driver.lock but the last */
struct managed *managed_new(int card, uint64_t size);
void managed_free(struct managed *managed);
/* Brings memory to the card, or away from it; what that takes in ns. */
uint64_t managed_touch(const struct range *range, uint64_t address, uint64_t bytes, bool fault);
uint64_t managed_leave(const struct range *range, uint64_t address, uint64_t bytes);
/* Makes some room for so much of something else; false: there is nothing to make it of. */
bool managed_give_way(int card, uint64_t bytes);

/* bus.c: time of copies and fills. A bit of `arrays`: TO or FROM is the contents of an array. */
enum { BUS_TO_ARRAY = 1, BUS_FROM_ARRAY = 2 };
void bus_copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, uint64_t bytes, unsigned arrays);
void bus_set(CUstream stream, CUdeviceptr to, uint64_t bytes);
/* Of unmapping, mapping or setting access, in the calling thread. */
void bus_remap(uint64_t begin);

/* lazy.c */
bool loading_lazy(void);
/* Loads the code of a function that has none yet. */
void function_load(CUfunction function);

/* images.c: PTX, cubins and fatbins */
struct image {
    const char *bytes;
    size_t size;
    bool binary, compressed; /* a part of it, so that its names cannot be read */
};
/* False: a driver would not load it. */
bool image_read(const void *given, struct image *image);
/* Calls visit for every variable whose name and size can be read; the name is not terminated. */
void image_variables(const struct image *image, void (*visit)(CUmodule, const char *name, size_t length, uint64_t size),
                     CUmodule module);

/* variables.c */
void variables_read(CUmodule module, const struct image *image);
void variables_free(CUmodule module);

/* modules.c */
/* Where libraries are loaded eagerly: all there are into a new context. */
void libraries_of_context_load(CUcontext context);
CUresult function_resolve(CUfunction handle, CUcontext context, CUfunction *out);
void module_unload(CUmodule module);

/* capture.c: what a stream under capture does instead. CUDA_ERROR_NOT_READY: the stream is not capturing. */
CUresult capture_kernel(CUstream stream, const struct launch_shape *shape);
CUresult capture_copy(CUstream stream, struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult capture_set(CUstream stream, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                     size_t height);
CUresult capture_record(CUstream stream, CUevent event);
CUresult capture_wait(CUstream stream, CUevent event);
CUresult capture_host(CUstream stream, CUhostFn function, void *data);
CUresult capture_alloc(CUstream stream, CUdeviceptr *out, size_t bytes);
CUresult capture_free(CUstream stream, CUdeviceptr address);
/* A stream goes: the capture that began on it ends without a graph, one that it joined breaks. */
void capture_abandon(CUstream stream);
/* CUDA_ERROR_STREAM_CAPTURE_IMPLICIT where work of the legacy stream would wait for a stream under capture. */
CUresult capture_implicit(CUstream stream);
/* A capture that a stream takes part in becomes invalid. */
void capture_break(CUstream stream);
/* Whether a call that waits for the device must fail because of an open capture. */
CUresult capture_forbids(CUstream stream);
/* transfer.c: contents */
CUresult copy_bytes(struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult set_elements(int device, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                      size_t height);
/* mps.c: whether an MPS daemon is there, the multiprocessors that it leaves to this process, and those that the
 * device's attribute says: all of them only where contexts, not the device, are partitioned. */
bool mps_enabled(void);
unsigned mps_multiprocessors(void);
unsigned mps_reported_multiprocessors(void);
#endif
