/* Memory of graphs. An allocation node has its address from its creation. The card provides memory at the first launch
 * or upload, and gets it back only by cuDeviceGraphMemTrim.
 *
 * As in the CUDA programming guide: graphs of one stream use the same memory in turn; graphs of streams that run at
 * once need memory of their own. No other graph can use memory that a graph leaves allocated, until it is freed. */
#include <string.h>

#include "cuda/graph.h"

#define CHUNK (32 * MIB) /* step of growth, as for pools */
#define FINE (2 * MIB)   /* a page of device memory */
#define TENANTS 64

/* The memory that the launches of one stream use until the last of them has finished. */
struct tenant {
    CUstream stream; /* compared only, never dereferenced */
    int card;        /* the card that runs the stream */
    uint64_t sequence, bytes;
};

static struct reserve {
    uint64_t live; /* allocated and not yet freed */
    uint64_t reserved, reserved_high, used, used_high;
    struct tenant tenants[TENANTS];
    unsigned count;
} reserves[SIM_CARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t pages(uint64_t bytes) {
    return (bytes + FINE - 1) / FINE * FINE;
}

bool graph_allocates(CUgraph graph) {
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i]->kind == NODE_ALLOC || graph->nodes[i]->kind == NODE_FREE)
            return true;
    return false;
}

/* How many more times the graph allocates an address than frees it; *known: the graph has a node with this address. */
static int balance(CUgraph graph, CUdeviceptr address, bool *known) {
    int open = 0;
    *known = false;
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        if ((node->kind == NODE_ALLOC || node->kind == NODE_FREE) && node->address == address) {
            open += node->kind == NODE_ALLOC ? 1 : -1;
            *known = true;
        }
    }
    return open;
}

CUdeviceptr graph_address(CUgraph graph, CUcontext context, size_t bytes) {
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        struct block *block = node->kind == NODE_FREE ? block_of_graph(node->address) : NULL;
        bool known;
        if (block && block->size == bytes && block->context == context && balance(graph, node->address, &known) == 0)
            return node->address;
    }
    return block_new(bytes, context, BLOCK_GRAPH, NULL);
}

CUresult graph_address_check(CUgraph graph, CUdeviceptr address) {
    bool known;
    int open = balance(graph, address, &known);
    return block_of_graph(address) && (!known || open == 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int card_of(const struct CUgraphNode_st *node) {
    struct block *block = node->kind == NODE_ALLOC || node->kind == NODE_FREE ? block_of_graph(node->address) : NULL;
    return block ? block->context->card : -1;
}

uint32_t graph_cards(const struct CUgraphNode_st *nodes, size_t count) {
    uint32_t cards = 0;
    for (size_t i = 0; i < count; i++) {
        int card = nodes[i].kind == NODE_ALLOC ? card_of(&nodes[i]) : -1;
        cards |= card >= 0 ? 1u << card : 0;
    }
    return cards;
}

static bool own(const struct CUgraphExec_st *exec, CUdeviceptr address) {
    for (size_t i = 0; i < exec->count; i++)
        if (exec->nodes[i].kind == NODE_ALLOC && exec->nodes[i].address == address)
            return true;
    return false;
}

/* The most that one run has allocated on a card at once; *left: what the run leaves allocated. */
static uint64_t peak_of(const struct CUgraphExec_st *exec, int card, uint64_t *left) {
    uint64_t now = 0, peak = 0;
    for (size_t i = 0; i < exec->count; i++) {
        const struct CUgraphNode_st *node = &exec->nodes[i];
        if (card_of(node) != card)
            continue;
        uint64_t bytes = pages(block_of_graph(node->address)->size);
        if (node->kind == NODE_ALLOC)
            now += bytes;
        else if (own(exec, node->address))
            now -= bytes;
        peak = now > peak ? now : peak;
    }
    *left = now;
    return peak;
}

static struct tenant *tenant_of(struct reserve *reserve, CUstream stream) {
    for (unsigned i = 0; i < reserve->count; i++)
        if (reserve->tenants[i].stream == stream)
            return &reserve->tenants[i];
    return NULL;
}

/* Forgets streams that have finished; returns what the other streams use. */
static uint64_t busy(struct reserve *reserve, CUstream except) {
    uint64_t bytes = 0;
    unsigned kept = 0;
    for (unsigned i = 0; i < reserve->count; i++) {
        struct tenant tenant = reserve->tenants[i];
        if (sim_finished(&driver.sim, tenant.card, tenant.sequence))
            continue;
        reserve->tenants[kept++] = tenant;
        bytes += tenant.stream == except ? 0 : tenant.bytes;
    }
    reserve->count = kept;
    return bytes;
}

static void raise_high(struct reserve *reserve, uint64_t used) {
    reserve->used = used;
    if (used > reserve->used_high)
        reserve->used_high = used;
    if (reserve->reserved > reserve->reserved_high)
        reserve->reserved_high = reserve->reserved;
}

static CUresult grow(int card, uint64_t need) {
    struct reserve *reserve = &reserves[card];
    if (need <= reserve->reserved)
        return CUDA_SUCCESS;
    uint64_t growth = (need - reserve->reserved + CHUNK - 1) / CHUNK * CHUNK;
    CUresult result = charge(card, growth);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        growth = pages(need - reserve->reserved);
        result = charge(card, growth);
    }
    if (!result)
        reserve->reserved += growth;
    return result;
}

static CUresult reserve_on(CUgraphExec exec, CUstream stream, int card) {
    uint64_t left, peak = peak_of(exec, card, &left);
    struct reserve *reserve = &reserves[card];
    pthread_mutex_lock(&lock);
    uint64_t others = busy(reserve, stream);
    const struct tenant *before = tenant_of(reserve, stream);
    uint64_t need = reserve->live + others + (before && before->bytes > peak ? before->bytes : peak);
    CUresult result = !before && reserve->count == TENANTS ? CUDA_ERROR_OUT_OF_MEMORY : grow(card, need);
    if (!result)
        raise_high(reserve, need);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult graph_memory_clear(CUgraphExec exec) {
    for (size_t i = 0; i < exec->count && exec->cards; i++) {
        struct block *block = exec->nodes[i].kind == NODE_ALLOC ? block_of_graph(exec->nodes[i].address) : NULL;
        if (!block || block->absent)
            continue;
        if (!(exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH))
            return CUDA_ERROR_INVALID_VALUE;
        memory_free(exec->nodes[i].address);
    }
    return CUDA_SUCCESS;
}

CUresult graph_memory_reserve(CUgraphExec exec, CUstream stream) {
    CUresult result = CUDA_SUCCESS;
    for (int card = 0; card < SIM_CARDS && !result; card++)
        if (exec->cards & 1u << card)
            result = reserve_on(exec, stream, card);
    return result;
}

void graph_memory_occupied(CUgraphExec exec, CUstream stream) {
    for (int card = 0; card < SIM_CARDS && exec->cards; card++) {
        if (!(exec->cards & 1u << card))
            continue;
        uint64_t left, bytes = peak_of(exec, card, &left) - left;
        struct reserve *reserve = &reserves[card];
        pthread_mutex_lock(&lock);
        struct tenant *tenant = tenant_of(reserve, stream);
        if (!tenant && reserve->count < TENANTS) {
            tenant = &reserve->tenants[reserve->count++];
            *tenant = (struct tenant){.stream = stream, .card = stream->context->card};
        }
        if (tenant) {
            tenant->sequence = stream_last(stream);
            tenant->bytes = bytes > tenant->bytes ? bytes : tenant->bytes;
        }
        pthread_mutex_unlock(&lock);
    }
}

CUresult graph_memory_back(CUdeviceptr address) {
    struct block *block = block_of_graph(address);
    if (!block)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (block->absent)
        reserves[block->context->card].live += pages(block->size);
    block->absent = false;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

void graph_memory_release(const struct block *block) {
    pthread_mutex_lock(&lock);
    reserves[block->context->card].live -= pages(block->size);
    pthread_mutex_unlock(&lock);
}

void graph_memory_trim(int card) {
    struct reserve *reserve = &reserves[card];
    pthread_mutex_lock(&lock);
    uint64_t need = reserve->live + busy(reserve, NULL);
    if (reserve->reserved > need) {
        uncharge(card, reserve->reserved - need);
        reserve->reserved = need;
    }
    raise_high(reserve, need);
    pthread_mutex_unlock(&lock);
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    ENTER_DEVICE(device);
    graph_memory_trim(driver.visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    ENTER_DEVICE(device);
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    struct reserve *reserve = &reserves[driver.visible[device]];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    switch (attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        reserve->used = reserve->live + busy(reserve, NULL);
        *(cuuint64_t *)value = reserve->used;
        break;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = reserve->used_high; break;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = reserve->reserved; break;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = reserve->reserved_high; break;
    default: result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* cuda.h: high water marks can only be reset, to zero. */
CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    ENTER_DEVICE(device);
    if (!value || *(cuuint64_t *)value ||
        (attribute != CU_GRAPH_MEM_ATTR_USED_MEM_HIGH && attribute != CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    struct reserve *reserve = &reserves[driver.visible[device]];
    pthread_mutex_lock(&lock);
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        reserve->used_high = reserve->live + busy(reserve, NULL);
    else
        reserve->reserved_high = reserve->reserved;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
