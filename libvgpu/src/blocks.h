/* Memory of blocks (cuMemCreate) that nothing but a descriptor keeps on the card. */
#ifndef VGPU_BLOCKS_H
#define VGPU_BLOCKS_H
#include <stdbool.h>

/* Gives back the charges of exported blocks that are released and whose descriptors have been closed; true: there were some, of whatever card. Only
 * the driver hears of a close, so this is asked before a refusal and by cuMemGetInfo. */
bool vgpu_blocks_give_back(void);
#endif
