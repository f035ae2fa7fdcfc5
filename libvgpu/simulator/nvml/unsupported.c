/* Functions that the library exports but the simulated boards do not support. Their arguments do not matter, so this
 * file does not include nvml.h. */
#include "common/state.h"

int library_ready(void);

#define NOT_SUPPORTED 3 /* NVML_ERROR_NOT_SUPPORTED */
#define UNSUPPORTED(name)                                                                                              \
    __attribute__((visibility("default"))) int name(void);                                                             \
    int name(void) {                                                                                                   \
        int result = library_ready();                                                                                  \
        return result ? result : NOT_SUPPORTED;                                                                        \
    }
#include "nvml/unsupported.def"
