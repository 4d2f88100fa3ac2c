/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The option parser that every command shares: tables of long options over plain structs.
 *
 *     static const struct ft_option table[] = {
 *         FT_OPTION(struct ft_run_options, max_tokens, FT_OPTION_U32, "max-tokens", "N", "tokens to generate"),
 *     };
 *     struct ft_option_group groups[] = {{"Generation", table, FT_COUNT_OF(table), &run}};
 *
 * The struct holds the defaults before parsing; help prints them. `--name value` and `--name=value` are the
 * same, `--` ends the options, everything else is a positional argument. Byte values take K, M, G, T (powers
 * of 1024; KiB and KB alike). Strings point into argv. Threads: none. Errors: FT_USAGE naming the option,
 * what was found, and the closest known name.
 */
#ifndef FT_TOOLS_OPTIONS_H
#define FT_TOOLS_OPTIONS_H

#include "graph/error.h"
#include "graph/types.h"

#include <stdio.h>

#define FT_COUNT_OF(array) ((uint32_t)(sizeof(array) / sizeof((array)[0])))
#define FT_OPTION_LIST_MAX 64u
#define FT_OPTION_NO_FIELD SIZE_MAX

enum ft_option_kind {
    FT_OPTION_FLAG,       /* bool, set to true; takes no value */
    FT_OPTION_CLEAR,      /* bool, set to false; takes no value */
    FT_OPTION_U32,        /* uint32_t */
    FT_OPTION_U64,        /* uint64_t */
    FT_OPTION_BYTES,      /* uint64_t with units */
    FT_OPTION_F64,        /* double */
    FT_OPTION_F32,        /* float */
    FT_OPTION_STRING,     /* const char * */
    FT_OPTION_LIST,       /* struct ft_option_list, one item each time the option is given */
    FT_OPTION_CHOICE,     /* uint32_t: index into `choices` */
    FT_OPTION_U32_LIST,   /* struct ft_option_numbers: "0,1" */
    FT_OPTION_BYTES_LIST, /* struct ft_option_numbers with units: "12G,24G" */
};

struct ft_option_list {
    uint32_t count;
    const char *items[FT_OPTION_LIST_MAX];
};

struct ft_option_numbers {
    uint32_t count; /* 0 = not given */
    uint64_t items[FT_OPTION_LIST_MAX];
};

struct ft_option {
    const char *name; /* without the dashes */
    const char
        *value; /* name of the value in help: "N", "BYTES"; NULL for flags; choices: "a|b|c", parsed too */
    const char *help;
    const char *fallback; /* default as help says it; NULL = the value in the struct; "" = say nothing */
    enum ft_option_kind kind;
    size_t field;    /* offset of the target in the group's struct */
    size_t given;    /* offset of a bool that is set when the option is given, or FT_OPTION_NO_FIELD */
    double min, max; /* of numbers; min == max == 0: anything the type holds */
};

struct ft_option_group {
    const char *title; /* heading in help */
    const struct ft_option *options;
    uint32_t count;
    void *target; /* the struct that `field` counts from */
};

/* One command line's grammar. */
struct ft_option_set {
    const char *command; /* "ft run" */
    const char *usage;   /* what follows the command: "[options] [PROMPT]" */
    const char *about;   /* a few lines */
    const struct ft_option_group *groups;
    uint32_t group_count;
    uint32_t positional_max;
};

struct ft_option_rest {
    uint32_t count;
    const char *items[FT_OPTION_LIST_MAX];
    bool help; /* --help or -h was given: nothing else was checked */
};

/* argv[0] is the first argument, not the command. */
int ft_options_parse(const struct ft_option_set *set, int argc, char **argv, struct ft_option_rest *rest,
                     struct ft_error *err);
void ft_options_print_help(const struct ft_option_set *set, FILE *out);

/* "512M" -> bytes; false when it is not a size. */
bool ft_options_parse_bytes(const char *text, uint64_t *bytes);
/* The candidate closest to `word`, or NULL when none is near. */
const char *ft_options_find_closest(const char *word, const char *const *candidates, uint32_t count);
/* ft_bytes_format: "1.50 GiB" into text [cap]. */
const char *ft_options_format_bytes(uint64_t bytes, char *text, size_t cap);

#endif
