/* SPDX-License-Identifier: Apache-2.0 */
#include "io/name_set.h"

#include <stdlib.h>
#include <string.h>

#define COUNT_MAX (1u << 30)

struct ft_name_slot {
    uint32_t hash, index; /* index FT_NONE = free */
};

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/*
 * Eight bytes per multiplication: names are 60 bytes long and looked up a million times. The multiplier is
 * an odd number without pattern (2^64 / golden ratio).
 */
static uint32_t hash_name(struct ft_name name)
{
    uint64_t hash = 0x243f6a8885a308d3ull ^ (uint64_t)name.group << 32 ^ name.bytes, word;
    uint32_t at = 0;
    for (; name.bytes - at >= 8; at += 8) {
        memcpy(&word, name.text + at, 8);
        hash = fold(hash ^ word, 0x9e3779b97f4a7c15ull);
    }
    word = 0;
    for (uint32_t i = 0; at + i < name.bytes; i++)
        word |= (uint64_t)(unsigned char)name.text[at + i] << 8 * i;
    hash = fold(hash ^ word, 0x9e3779b97f4a7c15ull);
    return (uint32_t)(hash ^ hash >> 32);
}

static bool is_same(struct ft_name a, struct ft_name b)
{
    return a.bytes == b.bytes && a.group == b.group && memcmp(a.text, b.text, a.bytes) == 0;
}

/* The slot that holds the name, or the free one where it belongs. There is a free one. */
static struct ft_name_slot *find_slot(const struct ft_name_set *set, struct ft_name name, uint32_t hash)
{
    uint32_t mask = set->slot_count - 1;
    for (uint32_t i = hash & mask;; i = (i + 1) & mask) {
        struct ft_name_slot *slot = &set->slots[i];
        if (slot->index == FT_NONE || (slot->hash == hash && is_same(set->names[slot->index], name)))
            return slot;
    }
}

static bool grow_slots(struct ft_name_set *set, uint32_t slot_count)
{
    struct ft_name_slot *slots = malloc(slot_count * sizeof *slots);
    if (!slots)
        return false;
    memset(slots, 0xff, slot_count * sizeof *slots);
    for (uint32_t i = 0; i < set->slot_count; i++) {
        uint32_t at = set->slots[i].hash & (slot_count - 1);
        if (set->slots[i].index == FT_NONE)
            continue;
        while (slots[at].index != FT_NONE)
            at = (at + 1) & (slot_count - 1);
        slots[at] = set->slots[i];
    }
    free(set->slots);
    set->slots = slots;
    set->slot_count = slot_count;
    return true;
}

bool ft_name_set_reserve(struct ft_name_set *set, uint64_t count)
{
    uint32_t slot_count = set->slot_count ? set->slot_count : 16;
    if (count > COUNT_MAX)
        return false;
    if (count > set->room) {
        struct ft_name *names = realloc(set->names, count * sizeof *names);
        if (!names)
            return false;
        set->names = names;
        set->room = (uint32_t)count;
    }
    while (slot_count / 4 * 3 < count)
        slot_count *= 2;
    return slot_count == set->slot_count || grow_slots(set, slot_count);
}

uint32_t ft_name_set_add(struct ft_name_set *set, struct ft_name name)
{
    if (set->count == set->room && !ft_name_set_reserve(set, set->room ? 2ull * set->room : 8))
        return FT_NONE;
    uint32_t hash = hash_name(name);
    struct ft_name_slot *slot = find_slot(set, name, hash);
    if (slot->index == FT_NONE) {
        *slot = (struct ft_name_slot){.hash = hash, .index = set->count};
        set->names[set->count++] = name;
    }
    return slot->index;
}

uint32_t ft_name_set_find(const struct ft_name_set *set, struct ft_name name)
{
    return set->slot_count ? find_slot(set, name, hash_name(name))->index : FT_NONE;
}

void ft_name_set_fini(struct ft_name_set *set)
{
    free(set->names);
    free(set->slots);
    *set = (struct ft_name_set){0};
}
