/* The driver versions that the simulator can play: the newest CUDA version of each, and what its cuGetProcAddress
 * returns. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "common/state.h"

/* CUDA toolkit release notes, table of toolkits and drivers */
static const struct sim_driver drivers[] = {
    {.id = "13.0", .cuda = 13000, .version = "580.105.08"},
    {.id = "12.4", .cuda = 12040, .version = "550.54.15"},
    {.id = "11.8", .cuda = 11080, .version = "520.61.05"},
};

const struct sim_driver *sim_driver_named(const char *id) {
    for (size_t i = 0; i < sizeof drivers / sizeof *drivers; i++)
        if (strcmp(drivers[i].id, id) == 0)
            return &drivers[i];
    return NULL;
}

const struct sim_driver *sim_driver_of_spec(const char *spec) {
    const char *suffix = strchr(spec, '@');
    return suffix ? sim_driver_named(suffix + 1) : &drivers[0];
}

/* A program can ask for the version before cuInit, so this function also works before the state is opened. */
const struct sim_driver *sim_driver(void) {
    static const struct sim_driver *known;
    const struct sim_driver *found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found)
        return found;
    const char *named = secure_getenv("VGPU_SIM_DRIVER"), *spec = secure_getenv("VGPU_SIMULATE");
    if (named && *named)
        found = sim_driver_named(named);
    else if (spec && *spec)
        found = sim_driver_of_spec(spec);
    if (!found) {
        char dir[200];
        struct sim sim;
        if (sim_directory(dir, sizeof dir) == 0 && sim_open(&sim, dir) == 0) {
            found = sim_driver_of_spec(sim.state->spec);
            sim_close(&sim);
        }
    }
    if (!found)
        return &drivers[0]; /* no version is set yet, or cuInit will report the error */
    __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    return found;
}

const char *vgpu_sim_drivers(void) {
    return "13.0,12.4,11.8";
}
