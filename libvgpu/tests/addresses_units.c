/* Whether the driver is called inside the gate by what looks addresses up: prints nothing and ends with 0, or names the
 * check that failed. */
#define _GNU_SOURCE
#include "check.h"
#include "gate/gate.h"
#include "ledger/charge.h"
#include "pacer/graph_cards.h"

_Atomic(struct vgpu_local *) vgpu_local_memory;
_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

enum vgpu_mode vgpu_enforcement_slowly(void) {
    return VGPU_REGION;
}

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

void vgpu_graph_cards_read(CUgraph graph, CUgraphExec exec) {
    (void)graph, (void)exec;
}

CUresult vgpu_no_cuda(void) {
    return CUDA_ERROR_NOT_FOUND;
}

static int inside, outside;

static CUresult answer(void) {
    inside += vgpu_gate_inside();
    outside += !vgpu_gate_inside();
    return CUDA_ERROR_INVALID_HANDLE;
}

/* clang-format off */
#define EACH(DO) \
    DO(cuGraphAddMemcpyNode) \
    DO(cuGraphAddMemsetNode) \
    DO(cuGraphAddBatchMemOpNode) \
    DO(cuGraphAddNode) \
    DO(cuGraphAddNode_v2) \
    DO(cuGraphAddNode_v3) \
    DO(cuGraphMemcpyNodeSetParams) \
    DO(cuGraphMemsetNodeSetParams) \
    DO(cuGraphBatchMemOpNodeSetParams) \
    DO(cuGraphNodeSetParams) \
    DO(cuGraphNodeSetParams_v2) \
    DO(cuGraphExecMemcpyNodeSetParams) \
    DO(cuGraphExecMemsetNodeSetParams) \
    DO(cuGraphExecBatchMemOpNodeSetParams) \
    DO(cuGraphExecChildGraphNodeSetParams) \
    DO(cuGraphExecNodeSetParams) \
    DO(cuGraphExecUpdate) \
    DO(cuGraphExecUpdate_v2) \
    DO(cuTexObjectCreate) \
    DO(cuTexRefSetAddress) \
    DO(cuTexRefSetAddress_v2) \
    DO(cuTexRefSetAddress2D) \
    DO(cuTexRefSetAddress2D_v2) \
    DO(cuTexRefSetAddress2D_v3) \
    DO(cuMemGetAccess)
/* clang-format on */

typedef CUresult (*any_function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

#define HOOK(symbol) {(void *)symbol, ENTRY_##symbol},
static const struct {
    void *function;
    enum vgpu_entry entry;
} hooks[] = {EACH(HOOK)};
#define HOOKS (int)(sizeof hooks / sizeof *hooks)

static void call_all(void) {
    inside = outside = 0;
    for (int i = 0; i < HOOKS; i++) {
        vgpu_driver_entries[hooks[i].entry] = (void *)answer;
        CHECK(((any_function)hooks[i].function)(0, 0, 0, 0, 0, 0) == CUDA_ERROR_INVALID_HANDLE);
    }
}

int main(void) {
    call_all();
    CHECK(outside == HOOKS && !inside);
    vgpu_gate_arm();
    call_all();
    CHECK(inside == HOOKS && !outside);
    CHECK(!vgpu_gate_inside() && vgpu_gate_close(1000000));
    vgpu_gate_open();
    return 0;
}
