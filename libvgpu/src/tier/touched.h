/* Which blocks launches touch, as far as the addresses stand in their parameters: what the policy learns from. Noted by
 * each thread for itself, and told to the policies in batches; of fast launches only some, at random. */
#ifndef VGPU_TOUCHED_H
#define VGPU_TOUCHED_H
#include "gate/gate.h"

#define VGPU_NOTED_BLOCKS 32u /* of one kernel, at most */

/* Blocks that the parameters of a kernel name: their numbers, and an address in each. */
struct vgpu_noting {
    uint32_t count;
    uint32_t blocks[VGPU_NOTED_BLOCKS];
    CUdeviceptr at[VGPU_NOTED_BLOCKS];
};
void vgpu_note_parameters(struct vgpu_noting *noting, CUfunction function, void **parameters, void **extra);
/* Tells the policies of one launch that touches the blocks at these addresses. */
void vgpu_touched_at(const CUdeviceptr *addresses, uint32_t count);

void vgpu_touched_kernel_slowly(struct vgpu_passage *mine, CUfunction function, void **parameters, void **extra);
/* Tells the policies what the calling thread has noted. */
void vgpu_touched_tell(struct vgpu_passage *mine);

/* Notes which blocks a kernel's parameters name, for one launch in several. Called before each launch of a process in
 * which something can move (the gate is armed). */
static inline void vgpu_touched_kernel(CUfunction function, void **parameters, void **extra) {
    struct vgpu_passage *mine = vgpu_passage;
    if (__builtin_expect(mine != NULL && mine->until_noted != 0, 0))
        mine->until_noted--;
    else
        vgpu_touched_kernel_slowly(mine, function, parameters, extra);
}
#endif
