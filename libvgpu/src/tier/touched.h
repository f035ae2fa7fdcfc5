/* Which blocks launches touch, by the addresses in their parameters; the policy learns from this. Each thread notes its
 * own launches and gives them to the policies in batches. Of fast launches it notes only some, at random. */
#ifndef VGPU_TOUCHED_H
#define VGPU_TOUCHED_H
#include "gate/gate.h"

#define VGPU_NOTED_BLOCKS 32u /* most blocks of one kernel */

/* Blocks named in a kernel's parameters: their numbers, and an address in each. */
struct vgpu_noting {
    uint32_t count;
    uint32_t blocks[VGPU_NOTED_BLOCKS];
    CUdeviceptr at[VGPU_NOTED_BLOCKS];
};
void vgpu_note_parameters(struct vgpu_noting *noting, CUfunction function, void **parameters, void **extra);
/* Gives the policies one launch that touches the blocks at these addresses. */
void vgpu_touched_at(const CUdeviceptr *addresses, uint32_t count);

void vgpu_touched_kernel_slowly(struct vgpu_passage *mine, CUfunction function, void **parameters, void **extra);
/* Gives the policies what the calling thread has noted. */
void vgpu_touched_tell(struct vgpu_passage *mine);

/* Notes which blocks a kernel's parameters name, for one launch in several. Called before each launch of a process
 * whose blocks can move (the gate is armed). */
static inline void vgpu_touched_kernel(CUfunction function, void **parameters, void **extra) {
    struct vgpu_passage *mine = vgpu_passage;
    if (__builtin_expect(mine != NULL && mine->until_noted != 0, 0))
        mine->until_noted--;
    else
        vgpu_touched_kernel_slowly(mine, function, parameters, extra);
}
#endif
