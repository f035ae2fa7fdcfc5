/* Time of copies and fills, if VGPU_SIM_TIME gives them time. Between card and host memory, the bytes cross the bus.
 * Within a card, an engine or the multiprocessors (as for kernels) read and write them at the speed of the card's
 * memory. The contents are always copied at once (transfer.c). */
#include "cuda/driver.h"

static bool in_host(CUdeviceptr address) {
    if (address >= DEVICE_WINDOW && address < RESERVATION_WINDOW)
        return false;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    bool host = address < DEVICE_WINDOW;
    if (range && range->kind == RANGE_MAPPED)
        host = range->physical->card < 0;
    if (range && range->kind == RANGE_MANAGED)
        host = range->managed != NULL;
    pthread_mutex_unlock(&driver.lock);
    return host;
}

static uint64_t at_speed(uint64_t bytes, uint64_t speed) {
    return (uint64_t)((__uint128_t)bytes * 1000 / speed);
}

static uint64_t within_card(uint64_t bytes) {
    return at_speed(bytes, driver.sim.timing.memory);
}

/* Until a copy ends, its mappings must stay. */
static void note(CUcontext context, CUdeviceptr address, uint64_t end) {
    if (address < RESERVATION_WINDOW)
        return;
    pthread_mutex_lock(&driver.lock);
    struct range *range = range_find(address, false);
    if (range && range->kind == RANGE_MAPPED && range->use.copied < end) {
        if (!range->use.context)
            range->use.context = context;
        range->use.copied = end;
    }
    pthread_mutex_unlock(&driver.lock);
}

/* Runs like a kernel that fills the card. */
static uint64_t on_multiprocessors(CUstream stream, uint64_t ns) {
    int card = stream->context->card;
    events_settle_some(card);
    host_wait(stream->host);
    uint64_t sequence = stream_occupy(stream, ns, SIM_WHOLE, 0);
    uint64_t end = sequence ? sim_expected_end(&driver.sim, card, (struct sim_mark){sequence, 0}) : 0;
    sim_wait_queued(&driver.sim, card);
    return end;
}

void bus_copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, uint64_t bytes, unsigned arrays) {
    if (!driver.sim.timing.within)
        return;
    bool to_host = !(arrays & BUS_TO_ARRAY) && in_host(to), from_host = !(arrays & BUS_FROM_ARRAY) && in_host(from);
    if (to_host && from_host)
        return; /* the CPU does this */
    if (to_host != from_host && !driver.sim.timing.copies)
        return;
    uint64_t bus = driver.sim.timing.bus, ns = within_card(2 * bytes), end;
    if (bus && to_host != from_host)
        ns = at_speed(bytes, bus);
    if (!to_host && !from_host && driver.sim.timing.copies_take_sms)
        end = on_multiprocessors(stream, ns);
    else
        end = stream_engine(stream, to_host ? SIM_FROM_CARD : from_host ? SIM_TO_CARD : SIM_WITHIN_CARD, ns);
    note(stream->context, to, end);
    note(stream->context, from, end);
}

void bus_set(CUstream stream, CUdeviceptr to, uint64_t bytes) {
    bool host = driver.sim.timing.fills && in_host(to), across = host && driver.sim.timing.bus;
    if (!driver.sim.timing.fills || (host && !driver.sim.timing.copies))
        return;
    uint64_t ns = across ? at_speed(bytes, driver.sim.timing.bus) : within_card(bytes);
    note(stream->context, to,
         driver.sim.timing.fills_take_sms && !across
             ? on_multiprocessors(stream, ns)
             : stream_engine(stream, across ? SIM_FROM_CARD : SIM_WITHIN_CARD, ns));
}

void bus_remap(uint64_t begin) {
    if (driver.sim.timing.remap_ns)
        sim_sleep_until(begin + driver.sim.timing.remap_ns / 3);
}
