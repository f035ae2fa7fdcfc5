/* Which cards the container runtime would give to this process, and their PCI addresses. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/state.h"

#define BUSES_PER_DOMAIN 8

void sim_pci_address(const struct sim *sim, int card, unsigned *domain, unsigned *bus) {
    if (sim->profile->mig)
        card = 0; /* instances have the PCI address of their board */
    *domain = (unsigned)card / BUSES_PER_DOMAIN;
    *bus = sim->profile->first_bus + sim->profile->bus_step * ((unsigned)card % BUSES_PER_DOMAIN);
}

/* "0" is the board with all its instances, "0:2" is one instance. */
static bool names_instance(const char *name, size_t length, int card) {
    return length >= 1 && *name == '0' && (length == 1 || (length == 3 && name[1] == ':' && name[2] == '0' + card));
}

static int named_card(const struct sim *sim, const char *name, size_t length) {
    bool digits = length > 0 && length < 4 && !sim->profile->mig;
    for (size_t i = 0; i < length; i++)
        digits = digits && isdigit((unsigned char)name[i]);
    if (digits) {
        int index = atoi(name);
        return index < (int)sim->state->card_count ? index : -1;
    }
    for (int i = 0; i < (int)sim->state->card_count; i++)
        if (strlen(sim->state->cards[i].uuid) == length && strncasecmp(sim->state->cards[i].uuid, name, length) == 0)
            return i;
    return -1;
}

int sim_container_cards(const struct sim *sim, int cards[SIM_CARDS]) {
    const char *list = secure_getenv("NVIDIA_VISIBLE_DEVICES");
    bool wanted[SIM_CARDS] = {false};
    int count = 0;
    if (list && (!*list || strcmp(list, "void") == 0))
        return -1;
    bool all = !list || strcmp(list, "all") == 0;
    while (!all && list) {
        int card = named_card(sim, list, strcspn(list, ","));
        if (card >= 0)
            wanted[card] = true;
        for (int i = 0; sim->profile->mig && i < (int)sim->state->card_count; i++)
            wanted[i] |= names_instance(list, strcspn(list, ","), i);
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    for (int i = 0; i < (int)sim->state->card_count; i++)
        if (all || wanted[i])
            cards[count++] = i;
    return count;
}
