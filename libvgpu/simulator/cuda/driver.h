/* What the sources of the simulated libcuda share. */
#ifndef VGPU_SIMULATOR_DRIVER_H
#define VGPU_SIMULATOR_DRIVER_H
#define __CUDA_API_VERSION_INTERNAL /* declares every version of every entry point under its own symbol */
#pragma GCC visibility push(default)
#include <cuda.h>
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device); /* from CUDA 9.2; cuda.h declares only its successor */
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
/* per block, on every board */
#define MAX_THREADS 1024
#define DEFAULT_SHARED 49152
#define DEVICE_WINDOW (1ull << 48) /* device addresses are above all addresses that a host program can map */
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
    OBJECT_PRIMARY_WAITING, /* handle of a primary context that is not active */
    OBJECT_UNFINISHED
};
struct object {
    uint32_t type, reserved;
    struct object *next_free;
};
/* Handles live in an arena of their own, so that any value from a program can be checked, even a destroyed handle. */
void *object_new(enum object_type type);
/* Makes an OBJECT_UNFINISHED visible after all fields are filled in: a thread may still use the handle of the previous
 * object in this place, for example as its current context. */
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
    _Atomic uint64_t waits;      /* the stream waits for all launches up to this one */
    _Atomic uint64_t not_before; /* set by waits for work of another card, and by copies */
    /* when the stream's last kernel ends if no other process has the card; kept only if copies take time */
    _Atomic uint64_t planned;
    uint64_t host; /* ticket of the stream's last host function */
    uint64_t id;
    struct capture *capture;
    unsigned member;  /* index among the capture's streams */
    uint64_t owner;   /* the thread that has this stream as its CU_STREAM_PER_THREAD; 0: an ordinary stream */
    CUgreenCtx green; /* the green context for which the stream was made; NULL: none */
    bool detached;    /* that green context has been destroyed */
};

struct CUctx_st {
    struct object object;
    int device, card;
    unsigned flags, api_version;
    bool primary, dead;
    unsigned references; /* for a primary context */
    uint64_t id;
    uint64_t host;           /* ticket of the last host function of any stream */
    _Atomic unsigned failed; /* error of a kernel; every later call returns it */
    /* as in a stream, but over all streams, or over those that wait for the legacy stream */
    _Atomic uint64_t copied, copied_blocking, planned_blocking;
    /* sequences over all streams, and over those that wait for the legacy stream */
    _Atomic uint64_t last, last_blocking;
    struct CUstream_st *legacy;
    size_t limits[8];
    CUfunc_cache cache;
    uint32_t peers;                      /* a bit for each ordinal whose memory this context may use */
    _Atomic uint64_t waits, waits_until; /* as in a stream, for all streams */
    CUgreenCtx green;                    /* NULL: not the handle of a green context */
    /* for a green handle: the primary context, which owns everything that is made in the green context */
    CUcontext base;
};

/* A green context: a part of a primary context with its own multiprocessors, and its handle as a CUcontext. */
struct CUgreenCtx_st {
    struct object object;
    CUcontext handle;
    CUdevResource resource;
    uint64_t id;
    struct CUstream_st *legacy;
    _Atomic uint64_t last, waits, waits_until; /* as in a context */
};

struct CUevent_st {
    struct object object;
    CUcontext context; /* NULL: the context is destroyed, but the event may still exist */
    int card;
    unsigned flags;
    enum { EVENT_FRESH, EVENT_PENDING, EVENT_DONE } state;
    struct sim_mark mark;
    uint64_t recorded, time, host, not_before, planned;
    struct CUevent_st *next_pending;
    struct capture *capture;
    size_t record; /* index among the capture's events */
};

struct CUmod_st {
    struct object object;
    CUcontext context;
    uint64_t bytes;
    struct CUlib_st *library;
    CUfunction *functions;
    unsigned count;
    struct variable *variables;
    bool opaque; /* an image without readable names: every name is accepted as a function and as a variable */
};

#define DURATIONS 8
struct duration {           /* time of a kernel's launches, from its name */
    uint64_t ns[DURATIONS]; /* used in turn; per launch, or per block */
    unsigned count;
    bool per_block;
    uint32_t meets;         /* number of cards on which its launches wait for each other; 0: none */
    uint64_t name;          /* name of meeting kernels */
    uint64_t argument_unit; /* ns per unit of the first parameter; 0: the parameter does not matter */
    uint32_t *factors;      /* factors of a log-normal distribution; NULL: none */
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
    enum touch touch;    /* what its launches do to memory, by the function's name */
    _Atomic bool loaded; /* its code is loaded */
    bool retrieved;      /* found by name, not only enumerated */
    unsigned part;       /* percent of a block that its launches touch */
    int dynamic_shared, carveout, parameters, clusters[5];
    uint16_t *parameter_sizes;
};

struct CUlib_st {
    struct object object;
    char *image;
    struct CUkern_st **kernels;
    unsigned count;
    CUmodule *modules; /* one per context that has used the library */
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
    bool level; /* a level of a mipmapped array, which owns the memory */
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
    uint32_t readers, writers; /* a bit for each other ordinal that may read, or write */
    int reuse[3];
    pthread_mutex_t lock;
};

/* Physical memory of cuMemCreate. */
struct physical {
    struct object object;
    CUmemAllocationProp properties;
    int card;    /* -1: host */
    int account; /* the card to which host memory is counted */
    uint64_t size;
    unsigned references; /* handles + mappings */
    unsigned handles;
    char *contents;
    struct shareable *shareable; /* NULL: cannot be shared with another process */
    int fd;                      /* descriptor of its file, if shareable */
    struct multicast *multicast; /* for a multicast object, which has no contents */
};

enum block_kind { BLOCK_DEVICE, BLOCK_POOL, BLOCK_GRAPH, BLOCK_EXTERNAL, BLOCK_IMPORTED, BLOCK_VARIABLE };
struct block {
    uint64_t size, id;
    CUcontext context;
    void *owner;    /* BLOCK_POOL: the pool; BLOCK_EXTERNAL: the external memory, which has the contents */
    char *contents; /* made at the first touch, so that unused memory costs no host memory */
    uint32_t next_free;
    uint8_t live, kind;
    bool shared : 1;      /* exported by cuIpcGetMemHandle */
    bool synchronous : 1; /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
    bool absent;          /* graph memory that no launch has made now */
};

enum range_kind { RANGE_HOST, RANGE_REGISTERED, RANGE_MANAGED, RANGE_RESERVED, RANGE_MAPPED };
struct range {
    uint64_t base, size, id;
    enum range_kind kind;
    unsigned flags;
    CUcontext context;
    struct physical *physical; /* of a mapping, starting at `offset` */
    uint64_t offset;
    uint32_t readers, writers; /* of a mapping: a bit for each ordinal that may read (write), and one for the host */
    struct {                   /* of a mapping: the last launch that names it, and when the last copy ends */
        CUcontext context;
        uint64_t launch, copied;
    } use;
    struct managed *managed; /* for managed memory that comes and goes */
    int card;                /* the card to which host memory is counted */
    bool synchronous;        /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
};

extern struct driver {
    struct sim sim;
    int visible[SIM_CARDS], count; /* the card of each ordinal */
    CUcontext primary[SIM_CARDS];  /* active primary contexts */
    CUcontext primary_handle[SIM_CARDS];
    unsigned primary_flags[SIM_CARDS];
    CUmemoryPool default_pool[SIM_CARDS], current_pool[SIM_CARDS];
    pthread_mutex_t lock; /* protects contexts, modules, ranges: everything that is not called often */
    _Atomic uint64_t next_id;
    _Atomic unsigned mapped; /* number of mappings of physical memory */
} driver;

struct thread_state {
    CUcontext stack[64];
    int depth;
    CUstreamCaptureMode capture_mode;
    bool own_default_stream;        /* inside a call of a per-thread variant */
    int captures;                   /* captures begun by this thread in a mode other than relaxed */
    CUstream per_thread[SIM_CARDS]; /* the thread's own stream used last on each card */
    uint64_t id;                    /* id of this thread as owner of such streams; 0: none yet */
};
struct thread_state *thread_state(void);

bool driver_ready(void);
/* Lets this process hold memory; contexts and physical memory need this. */
bool driver_register(void);
uint64_t driver_id(void);
/* Whether VGPU_SIM_STRICT contains this name of a stricter driver behaviour. */
bool strict_about(const char *what);

/* The current context of this thread (for a green context: its primary context), or the error of a call without a
 * context. */
CUresult current_context(CUcontext *out);
static inline CUresult device_check(CUdevice device) {
    return !driver_ready()                        ? CUDA_ERROR_NOT_INITIALIZED
           : device < 0 || device >= driver.count ? CUDA_ERROR_INVALID_DEVICE
                                                  : CUDA_SUCCESS;
}
/* Every entry point begins with this, directly or through a form below: it injects errors on demand. */
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

/* Charges bytes; returns -ENOMEM and other errors as CUDA errors. */
CUresult charge(int card, uint64_t bytes);
/* The card to which new host memory is counted: that of the current context, else the first visible card. */
int host_account(void);
void uncharge(int card, uint64_t bytes);

/* blocks.c: device memory by address */
CUdeviceptr block_new(uint64_t size, CUcontext context, enum block_kind kind, void *owner);
/* Gives a new block contents that are already mapped. */
void block_contents(CUdeviceptr base, char *contents);
/* The live block that contains an address, and its base; NULL: none. */
struct block *block_find(CUdeviceptr address, CUdeviceptr *base);
/* The graph allocation that begins at an address, even without memory now; NULL: none. */
struct block *block_of_graph(CUdeviceptr address);
/* Takes a live block out if `address` is its base and its kind is at most `last`; copies its fields to `out`. */
bool block_take(CUdeviceptr address, enum block_kind last, struct block *out);
/* Frees every block that match accepts, and calls visit for each. */
void block_each(bool (*match)(const struct block *, void *), void (*visit)(const struct block *, void *),
                void *argument);

/* ranges.c: host, managed and mapped memory, ordered by address; call with driver.lock held */
struct range *range_find(uint64_t address, bool reserved);
struct range *range_add(const struct range *range);
void range_remove(struct range *range);
struct range *range_overlap(uint64_t base, uint64_t size, bool reserved);
void range_each(bool (*match)(const struct range *, void *), void (*drop)(const struct range *, void *),
                void *argument);

/* Host address of up to `size` bytes of any memory; *length: how many bytes are contiguous. `device`: the ordinal that
 * reads or writes, which needs access to mappings. */
CUresult view(int device, CUdeviceptr address, size_t size, bool writes, char **host, size_t *length);
char *zero_pages(uint64_t size);
/* The ordinals that access the two ends of a copy: the stream's card, or the cards of the contexts that the call
 * names. */
struct sides {
    int to, from;
};

/* shared.c: contents that other processes can see */
int shared_memory_file(const char *name);
char *shared_map(int fd, uint64_t offset, uint64_t size);
/* Makes *contents (NULL: none yet) a part of a file, from `offset` on, without changing its address here. */
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
/* Destroys external memory that was imported into a context; its mappings are destroyed with the context's blocks. */
void external_of_context_drop(CUcontext context);

/* virtual.c: call with driver.lock held; NULL: no handle of physical memory */
struct physical *physical_of(CUmemGenericAllocationHandle handle);
void physical_drop(struct physical *physical);
bool host_memory_is_physical(void); /* whether cuMemCreate can make host memory */
/* How the card of an ordinal (-1: the host) may access a mapping; call with driver.lock held. */
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
    CUdeviceptr mapping; /* for VMM memory; size 0: reserved, but nothing mapped */
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
/* The handle of a device's primary context, which stays the same before, during and between its lives; NULL: no
 * room. */
CUcontext context_primary(int device);
/* storage.c: storage_end runs the callbacks that libraries have registered for the end of a context, without any lock.
 * storage_forget drops what was put meanwhile. */
void storage_end(CUcontext context);
void storage_forget(CUcontext context);
/* memory.c: memory_free is cuMemFree for any caller; ranges_of_context_drop frees the host and managed memory of a
 * context */
CUresult memory_free(CUdeviceptr address);
void ranges_of_context_drop(CUcontext context);

/* green.c */
/* The current green context; NULL: none. */
CUgreenCtx current_green(void);
/* A primary context is destroyed together with its green contexts. */
void greens_of_context_drop(CUcontext context);
/* Waits for a context, or for a green context by its handle. */
void context_wait(CUcontext context);

/* streams.c */
CUresult stream_resolve(CUstream handle, CUstream *out);
CUstream stream_new(CUcontext context, unsigned flags, int priority);
/* When all launches up to this sequence have ended, all work issued to the stream has ended, too. */
uint64_t stream_last(CUstream stream);
CUresult stream_wait(CUstream stream);
struct launch_shape {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    uint64_t argument; /* the first parameter, if the function's time depends on it */
    unsigned pointers;
    /* words of its parameters that name memory; parameters of a function that touches memory */
    uint64_t pointer[MAX_POINTERS], operand[3];
};
CUresult stream_launch(CUstream stream, const struct launch_shape *shape);
/* The mark of a stream's work: the legacy stream waits for all blocking streams. */
struct sim_mark stream_mark(CUstream stream);
bool stream_ended(CUstream stream);
/* When the stream's last kernel ends if no other process has the card. */
uint64_t stream_planned(CUstream stream);
/* Occupies the card for some time in stream order; 0: this process lost its slot. */
uint64_t stream_occupy(CUstream stream, uint64_t duration, uint32_t width, uint32_t group);
/* Several threads may launch on one stream at once. */
static inline void raise_to(_Atomic uint64_t *last, uint64_t sequence) {
    uint64_t now = atomic_load_explicit(last, memory_order_relaxed);
    while (now < sequence &&
           !atomic_compare_exchange_weak_explicit(last, &now, sequence, memory_order_relaxed, memory_order_relaxed))
        ;
}

/* events.c: set the times of events whose work has ended; the second form only continues if events wait for that
 * card */
void events_settle(void);
void events_settle_some(int card);
/* Records an event after all launches of a context up to `last`. */
void event_record_all(CUevent event, CUcontext context, uint64_t last);
/* Lets the owner of these two words (as in a stream) wait for an event. */
void event_wait_by(CUevent event, int card, _Atomic uint64_t *waits, _Atomic uint64_t *until);
/* Later work of `stream` waits for the current work of `other`, on any card, as far as it is known. */
void stream_follow(CUstream stream, CUstream other);
/* The earliest start of work in a stream, in addition to its earlier launches. */
uint64_t stream_not_before(CUstream stream);
/* Gives a copy time on an engine of the stream's card, in stream order; returns when it ends. */
uint64_t stream_engine(CUstream stream, enum sim_engine_kind engine, uint64_t duration);
void copies_wait(CUcontext context);
/* per_thread.c: this thread's own stream of a context; NULL: no room */
CUstream stream_per_thread(CUcontext context);

/* host.c: host functions in stream order; tickets count them */
CUresult host_launch(CUstream stream, CUhostFn function, void *data);
bool host_done(uint64_t ticket);
void host_wait(uint64_t ticket);

/* durations.c */
void duration_read(struct duration *duration, const char *name);
void duration_free(struct duration *duration);
/* Duration of the next launch in nanoseconds. */
uint64_t duration_next(struct duration *duration, uint64_t blocks, uint64_t argument);
/* The first parameter, if the function's time depends on it. */
uint64_t function_argument(CUfunction function, void **params, void **extra);

/* touch.c: memory that launches touch */
void touch_name(CUfunction function);
/* Whether the simulator needs to know what a launch touches. */
static inline bool touch_matters(CUfunction function) {
    return function->touch || driver.sim.timing.copies || driver.sim.timing.migrate ||
           atomic_load_explicit(&driver.mapped, memory_order_relaxed);
}
/* Stores what a launch needs to know of its parameters. */
void touch_read(struct launch_shape *shape, void **params, void **extra);
/* Does the kernel's work on memory; returns the nanoseconds that it waits for memory that is not on the card. */
uint64_t touch_launch(CUcontext context, const struct launch_shape *shape);
/* Records that a launch uses its mappings. */
void touch_note(CUcontext context, const struct launch_shape *shape, uint64_t sequence);
/* Call with driver.lock held. A mapping is removed: a launch that still uses it fails. */
void touch_unmap(const struct range *range);
/* The memory of a kernel was missing. */
void context_fail(CUcontext context);

/* managed.c: managed memory that comes and goes; call with driver.lock held, except for the last */
struct managed *managed_new(int card, uint64_t size);
void managed_free(struct managed *managed);
/* Bring memory to the card, or away from it; return the time in ns. */
uint64_t managed_touch(const struct range *range, uint64_t address, uint64_t bytes, bool fault);
uint64_t managed_leave(const struct range *range, uint64_t address, uint64_t bytes);
/* Makes some room for other memory of `bytes`; false: no managed memory can leave. */
bool managed_give_way(int card, uint64_t bytes);

/* bus.c: time of copies and fills. Bits of `arrays`: TO or FROM is the contents of an array. */
enum { BUS_TO_ARRAY = 1, BUS_FROM_ARRAY = 2 };
void bus_copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, uint64_t bytes, unsigned arrays);
void bus_set(CUstream stream, CUdeviceptr to, uint64_t bytes);
/* Time of unmapping, mapping or setting access, in the calling thread. */
void bus_remap(uint64_t begin);

/* lazy.c */
bool loading_lazy(void);
/* Loads the code of a function if it is not loaded yet. */
void function_load(CUfunction function);

/* images.c: PTX, cubins and fatbins */
struct image {
    const char *bytes;
    size_t size;
    bool binary, compressed; /* a part is compressed, so that its names cannot be read */
};
/* False: a driver would not load the image. */
bool image_read(const void *given, struct image *image);
/* Calls visit for every variable with a readable name and size; the name is not NUL-terminated. */
void image_variables(const struct image *image, void (*visit)(CUmodule, const char *name, size_t length, uint64_t size),
                     CUmodule module);

/* variables.c */
void variables_read(CUmodule module, const struct image *image);
void variables_free(CUmodule module);

/* modules.c */
/* If libraries are loaded eagerly: loads all of them into a new context. */
void libraries_of_context_load(CUcontext context);
CUresult function_resolve(CUfunction handle, CUcontext context, CUfunction *out);
void module_unload(CUmodule module);

/* capture.c: what a stream under capture does instead of the work. CUDA_ERROR_NOT_READY: the stream is not
 * capturing. */
CUresult capture_kernel(CUstream stream, const struct launch_shape *shape);
CUresult capture_copy(CUstream stream, struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult capture_set(CUstream stream, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                     size_t height);
CUresult capture_record(CUstream stream, CUevent event);
CUresult capture_wait(CUstream stream, CUevent event);
CUresult capture_host(CUstream stream, CUhostFn function, void *data);
CUresult capture_alloc(CUstream stream, CUdeviceptr *out, size_t bytes);
CUresult capture_free(CUstream stream, CUdeviceptr address);
/* A stream is destroyed: a capture that began on it ends without a graph; a capture that it joined breaks. */
void capture_abandon(CUstream stream);
/* CUDA_ERROR_STREAM_CAPTURE_IMPLICIT if work of the legacy stream would wait for a stream under capture. */
CUresult capture_implicit(CUstream stream);
/* Invalidates the capture in which a stream takes part. */
void capture_break(CUstream stream);
/* The error of a call that waits for the device while a capture is open. */
CUresult capture_forbids(CUstream stream);
/* transfer.c: contents */
CUresult copy_bytes(struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult set_elements(int device, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                      size_t height);
/* mps.c: whether an MPS daemon exists; the multiprocessors that it leaves to this process; and those that the device's
 * attribute reports. The attribute reports all of them if MPS partitions contexts, not the device. */
bool mps_enabled(void);
unsigned mps_multiprocessors(void);
unsigned mps_reported_multiprocessors(void);
#endif
