/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A set of names, each with a number from 0 in the order in which they came: keys of JSON objects, tensors of
 * a checkpoint, files of an index.
 *
 * The texts are the caller's and must outlive the set; they need no NUL. A name belongs to a group (one
 * object of a JSON text, say): equal texts of different groups are different names. All zeros is an empty
 * set. Open addressing with linear probing, at most three quarters full; slots keep 32 bits of the hash, so
 * that texts are compared practically only when they are equal. Threads: adding is for one, finding for all.
 */
#ifndef FT_IO_NAME_SET_H
#define FT_IO_NAME_SET_H

#include "graph/types.h"

struct ft_name {
    const char *text;
    uint32_t bytes, group;
};

struct ft_name_slot;

struct ft_name_set {
    struct ft_name *names;      /* [count] */
    struct ft_name_slot *slots; /* [slot_count], 0 or a power of two */
    uint32_t count, room, slot_count;
};

/* Room for `count` names, so that adding them cannot fail; false when there is no memory. */
bool ft_name_set_reserve(struct ft_name_set *set, uint64_t count);
/* The number of the name, which is added when absent; FT_NONE when there is no memory. It was new when the
 * number is the count that the set had before. */
uint32_t ft_name_set_add(struct ft_name_set *set, struct ft_name name);
/* The number of the name, or FT_NONE. */
uint32_t ft_name_set_find(const struct ft_name_set *set, struct ft_name name);
void ft_name_set_fini(struct ft_name_set *set);

#endif
