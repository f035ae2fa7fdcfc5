/* Charges memory that graphs allocate when they run. */
#define _GNU_SOURCE
#include "reserves/graphs.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "base/spin.h"
#include "ledger/charge.h"

#define CHUNK (32ull << 20) /* step by which the reserve grows, as for pools */
#define PAGE (2ull << 20)   /* of device memory */
#define STREAMS 32
#define BUCKETS 256
#define DEVICES 64

/* What the graphs launched on a device may need at the same time. */
static struct device_sums {
    uint32_t era;     /* from 1; a new era begins when the driver has returned all memory of graphs */
    uint64_t lasting; /* graphs that leave memory allocated */
    unsigned count;
    struct {
        struct key {
            uintptr_t stream;
            CUcontext context; /* NULL: the stream alone identifies it */
        } key;
        uint64_t bytes;
    } streams[STREAMS];
} sums[DEVICES];
static vgpu_lock sums_locks[DEVICES];

atomic_uint vgpu_graphs_known;
static struct vgpu_graph *buckets[BUCKETS];
static vgpu_spin table_lock;

void vgpu_graphs_forget(void) {
    memset(buckets, 0, sizeof buckets);
    memset(sums, 0, sizeof sums);
    memset(sums_locks, 0, sizeof sums_locks);
    atomic_store(&table_lock, 0);
    atomic_store(&vgpu_graphs_known, 0);
}

static struct vgpu_graph **place(CUgraphExec exec) {
    struct vgpu_graph **at = &buckets[((uintptr_t)exec * 0x9e3779b97f4a7c15ull) >> 56];
    while (*at && (*at)->exec != exec)
        at = &(*at)->next;
    return at;
}

struct vgpu_graph *vgpu_graph_take(CUgraphExec exec) {
    vgpu_own_tables();
    if (!atomic_load(&vgpu_graphs_known))
        return NULL;
    vgpu_spin_lock(&table_lock);
    struct vgpu_graph **at = place(exec), *graph = *at;
    if (graph) {
        *at = graph->next;
        atomic_fetch_sub(&vgpu_graphs_known, 1);
    }
    vgpu_spin_unlock(&table_lock);
    return graph;
}

void vgpu_graph_keep(struct vgpu_graph *graph, CUgraphExec exec) {
    if (exec)
        free(vgpu_graph_take(exec));
    if (!graph || !exec) {
        free(graph);
        return;
    }
    graph->exec = exec;
    graph->next = NULL;
    vgpu_spin_lock(&table_lock);
    *place(exec) = graph;
    atomic_fetch_add(&vgpu_graphs_known, 1);
    vgpu_spin_unlock(&table_lock);
}

struct vgpu_graph *vgpu_graph_find_slowly(CUgraphExec exec) {
    vgpu_own_tables();
    vgpu_spin_lock(&table_lock);
    struct vgpu_graph *graph = *place(exec);
    vgpu_spin_unlock(&table_lock);
    return graph;
}

/* Memory nodes during reading. */
struct node_list {
    struct entry {
        CUdevice device; /* -1: a free node */
        CUdeviceptr base;
        uint64_t end;
    } *entries;
    size_t count, room;
};

static bool append(struct node_list *list, struct entry entry) {
    if (list->count == list->room) {
        size_t room = list->room ? list->room * 2 : 64;
        struct entry *entries = realloc(list->entries, room * sizeof *entries);
        if (!entries)
            return false;
        list->entries = entries;
        list->room = room;
    }
    list->entries[list->count++] = entry;
    return true;
}

static CUresult read_nodes(CUgraph graph, struct node_list *list);

static CUresult read_node(CUgraphNode node, struct node_list *list) {
    CUgraphNodeType type;
    CUresult result = DRIVER(cuGraphNodeGetType)(node, &type);
    if (result != CUDA_SUCCESS)
        return result;
    bool added = true;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && DRIVER(cuGraphChildGraphNodeGetGraph)) {
        CUgraph child;
        result = DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child);
        return result == CUDA_SUCCESS ? read_nodes(child, list) : result;
    }
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && DRIVER(cuGraphMemAllocNodeGetParams)) {
        CUDA_MEM_ALLOC_NODE_PARAMS_v1 parameters = {0};
        result = DRIVER(cuGraphMemAllocNodeGetParams)(node, &parameters);
        const CUdevice device = vgpu_device_of_location(&parameters.poolProps.location);
        if (result == CUDA_SUCCESS && device != VGPU_NO_DEVICE)
            added = append(list, (struct entry){device, parameters.dptr, parameters.dptr + parameters.bytesize});
    } else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE && DRIVER(cuGraphMemFreeNodeGetParams)) {
        CUdeviceptr pointer = 0;
        result = DRIVER(cuGraphMemFreeNodeGetParams)(node, &pointer);
        added = result != CUDA_SUCCESS || append(list, (struct entry){-1, pointer, pointer});
    }
    return added ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult read_nodes(CUgraph graph, struct node_list *list) {
    size_t count = 0;
    CUresult result = DRIVER(cuGraphGetNodes)(graph, NULL, &count);
    if (result != CUDA_SUCCESS || !count)
        return result;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (!nodes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuGraphGetNodes)(graph, nodes, &count);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = read_node(nodes[i], list);
    free(nodes);
    return result;
}

/* Sorts by address; at the same address, allocations before frees. */
static int by_address(const void *left, const void *right) {
    const struct entry *a = left, *b = right;
    if (a->base != b->base)
        return a->base < b->base ? -1 : 1;
    return (a->device < 0) - (b->device < 0);
}

static struct vgpu_graph_part *part_of(struct vgpu_graph *graph, CUdevice device) {
    for (unsigned i = 0; i < graph->count; i++)
        if (graph->parts[i].device == device)
            return &graph->parts[i];
    if (graph->count == VGPU_GRAPH_DEVICES)
        return NULL;
    graph->parts[graph->count] = (struct vgpu_graph_part){.device = device, .contained = true};
    return &graph->parts[graph->count++];
}

/* A driver reuses the address of freed memory for the graph's next allocation, so the number of addresses counts. An
 * address that is allocated again without a free (its context is gone) counts again. */
static bool sum_up(struct vgpu_graph *graph, const struct node_list *list) {
    CUdeviceptr end = 0;
    for (size_t i = 0; i < list->count;) {
        const struct entry *entry = &list->entries[i];
        size_t allocated = 0, freed = 0;
        uint64_t last = entry->end;
        for (; i < list->count && list->entries[i].base == entry->base; i++) {
            bool is_free = list->entries[i].device < 0;
            allocated += !is_free;
            freed += is_free;
            if (!is_free && list->entries[i].end > last)
                last = list->entries[i].end;
        }
        if (!allocated)
            continue;
        struct vgpu_graph_part *part = part_of(graph, entry->device);
        if (!part)
            return false;
        CUdeviceptr from = entry->base & ~(PAGE - 1), to = (last + PAGE - 1) & ~(PAGE - 1);
        from = from < end ? end : from;
        part->bytes += to > from ? (to - from) * (allocated > freed + 1 ? allocated - freed : 1) : 0;
        end = to > end ? to : end;
        part->contained &= freed >= allocated;
    }
    return true;
}

CUresult vgpu_graph_read(CUgraph graph, struct vgpu_graph **out) {
    struct node_list list = {0};
    *out = NULL;
    if (!graph || !DRIVER(cuGraphGetNodes) || !DRIVER(cuGraphNodeGetType) || !DRIVER(cuDeviceGetGraphMemAttribute))
        return CUDA_SUCCESS;
    CUresult result = read_nodes(graph, &list);
    struct vgpu_graph *found = result == CUDA_SUCCESS && list.count ? calloc(1, sizeof *found) : NULL;
    if (found) {
        qsort(list.entries, list.count, sizeof *list.entries, by_address);
        if (!sum_up(found, &list))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (list.count) {
        result = result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    free(list.entries);
    if (found && (result != CUDA_SUCCESS || !found->count))
        free(found);
    else
        *out = found;
    return result;
}

struct vgpu_graph *vgpu_graph_later(struct vgpu_graph *before, struct vgpu_graph *now) {
    bool same = before && now && before->count == now->count;
    for (unsigned i = 0; same && i < now->count; i++)
        same = before->parts[i].device == now->parts[i].device && before->parts[i].bytes == now->parts[i].bytes &&
               before->parts[i].contained == now->parts[i].contained;
    free(same ? now : before);
    return same ? before : now;
}

/* A created stream is identified by its handle; the default streams and a thread's own stream differ in each
 * context. */
static struct key key_of(CUstream stream) {
    bool own = stream == CU_STREAM_PER_THREAD;
    struct vgpu_place here;
    if (!own && stream && stream != CU_STREAM_LEGACY)
        return (struct key){.stream = (uintptr_t)stream};
    return (struct key){.stream = own ? (uintptr_t)pthread_self() : 0,
                        .context = vgpu_place_now(&here) ? here.context : NULL};
}

static uint64_t needed(const struct device_sums *sum) {
    uint64_t bytes = sum->lasting;
    for (unsigned i = 0; i < sum->count; i++)
        bytes += sum->streams[i].bytes;
    return bytes;
}

/* With the lock held. Adds a graph to the memory needed at the same time. */
static void count_in(struct device_sums *sum, struct vgpu_graph_part *part, struct key key) {
    if (!part->contained) {
        sum->lasting += part->era == sum->era ? 0 : part->bytes;
        part->era = sum->era;
        return;
    }
    unsigned i = 0;
    while (i < sum->count && (sum->streams[i].key.stream != key.stream || sum->streams[i].key.context != key.context))
        i++;
    if (i == STREAMS) { /* streams without a place count as running all at once */
        sum->lasting += part->bytes;
        return;
    }
    if (i == sum->count) {
        sum->streams[sum->count].key = key;
        sum->streams[sum->count++].bytes = 0;
    }
    if (sum->streams[i].bytes < part->bytes)
        sum->streams[i].bytes = part->bytes;
}

/* How much the reserve may grow; the pool has been entered. */
static uint64_t growth_of(struct device_sums *sum, struct vgpu_graph_part *part, struct key key, uint64_t charged) {
    if (!charged) { /* nothing is reserved, nor about to be: the next launch starts again from zero */
        sum->era++;
        sum->lasting = 0;
        sum->count = 0;
    }
    count_in(sum, part, key);
    uint64_t all = needed(sum), growth = all > charged ? all - charged : 0;
    if (growth > part->bytes)
        growth = part->bytes;
    return (growth + CHUNK - 1) & ~(CHUNK - 1);
}

/* With the lock of the sums held. Before a refusal, gives back memory that finished graphs or pools keep unused. */
static bool charge_part(struct device_sums *sum, struct vgpu_pool *pool, struct vgpu_graph_part *part, struct key key,
                        uint64_t *growth) {
    struct vgpu_ticket ticket;
    unsigned card = vgpu_pool_card(pool);
    *growth = growth_of(sum, part, key, vgpu_pool_enter(pool));
    if (!*growth)
        return true;
    if (!vgpu_charge(card, VGPU_DEVICE_BYTES, *growth, &ticket)) {
        vgpu_pool_leave(pool, 0);
        vgpu_pools_give_back(card);
        *growth = growth_of(sum, part, key, vgpu_pool_enter(pool));
        enum vgpu_verdict verdict = *growth ? vgpu_reserve(card, *growth, &ticket) : VGPU_CHARGED;
        if (verdict == VGPU_REFUSED) {
            vgpu_pool_leave(pool, 0);
            return false;
        }
        *growth = verdict == VGPU_CHARGED ? *growth : 0;
    }
    if (*growth)
        vgpu_pool_expect(pool, ticket, *growth);
    return true;
}

bool vgpu_graph_charge(struct vgpu_graph *graph, CUstream stream, struct vgpu_graph_launch *launch) {
    struct key key = key_of(stream);
    launch->count = 0;
    for (unsigned i = 0; i < graph->count; i++) {
        struct vgpu_graph_part *part = &graph->parts[i];
        unsigned device = (unsigned)part->device % DEVICES;
        struct vgpu_pool *pool = vgpu_pool_of_graphs(part->device);
        uint64_t growth = 0;
        vgpu_lock_take(&sums_locks[device]);
        struct device_sums before = sums[device];
        struct vgpu_graph_part as_it_was = *part;
        bool charged = pool && charge_part(&sums[device], pool, part, key, &growth);
        if (!charged) {
            sums[device] = before;
            *part = as_it_was;
        }
        vgpu_lock_release(&sums_locks[device]);
        if (!charged) {
            vgpu_graph_settle(launch);
            return false;
        }
        launch->parts[launch->count].pool = pool;
        launch->parts[launch->count++].growth = growth;
    }
    return true;
}

void vgpu_graph_settle(const struct vgpu_graph_launch *launch) {
    for (unsigned i = 0; i < launch->count; i++)
        vgpu_pool_leave(launch->parts[i].pool, launch->parts[i].growth);
}
