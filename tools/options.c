/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/options.h"

#include "graph/bytes.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NAME_MAX_BYTES 48u
#define CANDIDATES_MAX 128u

/* ---- values ---- */

bool ft_options_parse_bytes(const char *text, uint64_t *bytes)
{
    static const char units[] = "KMGT";
    char *end;
    /* A size may have a fraction (1.5G), but no sign, exponent or NaN. */
    if (!isdigit((unsigned char)text[0]) || strpbrk(text, "eExXpP"))
        return false;
    double value = strtod(text, &end);
    double unit = 1;
    const char *found = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    if (found) {
        for (const char *u = units; u <= found; u++)
            unit *= 1024;
        end++;
        if (*end == 'i')
            end++;
    }
    if (*end == 'B')
        end++;
    if (*end || !(value * unit < 1.8e19))
        return false;
    *bytes = (uint64_t)(value * unit);
    return true;
}

const char *ft_options_format_bytes(uint64_t bytes, char *text, size_t cap)
{
    return ft_bytes_format(bytes, text, cap);
}

static int refuse_value(const struct ft_option *option, const char *value, const char *wanted,
                        struct ft_error *err)
{
    return ft_error_set(err, FT_USAGE, "--%s: \"%s\" is not %s", option->name, value, wanted);
}

static int check_range(const struct ft_option *option, double value, struct ft_error *err)
{
    if ((option->min != 0 || option->max != 0) && !(value >= option->min && value <= option->max))
        return ft_error_set(err, FT_USAGE, "--%s: %.10g is outside %.10g .. %.10g", option->name, value,
                            option->min, option->max);
    return FT_OK;
}

static int parse_unsigned(const struct ft_option *option, const char *value, uint64_t max, uint64_t *out,
                          struct ft_error *err)
{
    char *end;
    errno = 0;
    uint64_t number = strtoull(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end)
        return refuse_value(option, value, "a whole number", err);
    if (errno || number > max)
        return ft_error_set(err, FT_USAGE, "--%s: %s is too large (at most %llu)", option->name, value,
                            (unsigned long long)max);
    *out = number;
    return check_range(option, (double)number, err);
}

static int parse_real(const struct ft_option *option, const char *value, double *out, struct ft_error *err)
{
    char *end;
    *out = strtod(value, &end);
    if (end == value || *end || !isfinite(*out))
        return refuse_value(option, value, "a number", err);
    return check_range(option, *out, err);
}

/* The n-th word of "a|b|c" into word [cap]; false past the end. */
static bool choice_word(const char *choices, uint32_t n, char *word, size_t cap)
{
    for (; n; n--) {
        choices = strchr(choices, '|');
        if (!choices)
            return false;
        choices++;
    }
    snprintf(word, cap, "%.*s", (int)strcspn(choices, "|"), choices);
    return true;
}

static int parse_choice(const struct ft_option *option, const char *value, uint32_t *out,
                        struct ft_error *err)
{
    char word[NAME_MAX_BYTES];
    for (uint32_t n = 0; choice_word(option->value, n, word, sizeof word); n++)
        if (!strcmp(word, value)) {
            *out = n;
            return FT_OK;
        }
    return ft_error_set(err, FT_USAGE, "--%s: \"%s\" is none of %s", option->name, value, option->value);
}

static int push_item(const struct ft_option *option, struct ft_option_list *list, const char *value,
                     struct ft_error *err)
{
    if (list->count == FT_OPTION_LIST_MAX)
        return ft_error_set(err, FT_USAGE, "--%s: given more than %u times", option->name,
                            FT_OPTION_LIST_MAX);
    list->items[list->count++] = value;
    return FT_OK;
}

/* Items between commas, each as the option's single kind would be. */
static int parse_list(const struct ft_option *option, const char *value, struct ft_option_numbers *list,
                      struct ft_error *err)
{
    bool bytes = option->kind == FT_OPTION_BYTES_LIST;
    list->count = 0;
    for (const char *at = value;; at++) {
        char item[NAME_MAX_BYTES];
        size_t length = strcspn(at, ",");
        snprintf(item, sizeof item, "%.*s", (int)FT_MIN(length, sizeof item - 1), at);
        if (list->count == FT_OPTION_LIST_MAX)
            return ft_error_set(err, FT_USAGE, "--%s: more than %u values", option->name, FT_OPTION_LIST_MAX);
        uint64_t *to = &list->items[list->count++];
        if (bytes && !ft_options_parse_bytes(item, to))
            return refuse_value(option, value, "sizes such as 12G or 12G,24G", err);
        if (!bytes && !isdigit((unsigned char)item[0]))
            return refuse_value(option, value, "numbers such as 0 or 0,1", err);
        int status = bytes ? FT_OK : parse_unsigned(option, item, UINT32_MAX - 1, to, err);
        if (status != FT_OK)
            return status;
        at += length;
        if (!*at)
            return FT_OK;
    }
}

static int store_value(const struct ft_option *option, void *target, const char *value, struct ft_error *err)
{
    uint64_t whole = 0;
    double real = 0;
    int status = FT_OK;
    switch (option->kind) {
    case FT_OPTION_FLAG:
    case FT_OPTION_CLEAR:
        *(bool *)target = option->kind == FT_OPTION_FLAG;
        break;
    case FT_OPTION_U32:
        status = parse_unsigned(option, value, UINT32_MAX - 1, &whole, err);
        *(uint32_t *)target = (uint32_t)whole;
        break;
    case FT_OPTION_U64:
        status = parse_unsigned(option, value, UINT64_MAX, &whole, err);
        *(uint64_t *)target = whole;
        break;
    case FT_OPTION_BYTES:
        if (!ft_options_parse_bytes(value, target))
            status = refuse_value(option, value, "a size such as 512M or 8G", err);
        break;
    case FT_OPTION_F64:
        status = parse_real(option, value, target, err);
        break;
    case FT_OPTION_F32:
        status = parse_real(option, value, &real, err);
        *(float *)target = (float)real;
        break;
    case FT_OPTION_STRING:
        *(const char **)target = value;
        break;
    case FT_OPTION_LIST:
        status = push_item(option, target, value, err);
        break;
    case FT_OPTION_CHOICE:
        status = parse_choice(option, value, target, err);
        break;
    case FT_OPTION_U32_LIST:
    case FT_OPTION_BYTES_LIST:
        status = parse_list(option, value, target, err);
        break;
    }
    return status;
}

/* ---- names ---- */

static uint32_t edit_distance(const char *a, const char *b)
{
    uint32_t row[NAME_MAX_BYTES + 1];
    uint32_t width = (uint32_t)strnlen(b, NAME_MAX_BYTES);
    for (uint32_t j = 0; j <= width; j++)
        row[j] = j;
    for (uint32_t i = 0; a[i] && i < NAME_MAX_BYTES; i++) {
        uint32_t diagonal = row[0];
        row[0] = i + 1;
        for (uint32_t j = 0; j < width; j++) {
            uint32_t replaced = diagonal + (a[i] != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = FT_MIN(replaced, 1 + FT_MIN(row[j], row[j + 1]));
        }
    }
    return row[width];
}

const char *ft_options_find_closest(const char *word, const char *const *candidates, uint32_t count)
{
    const char *best = NULL;
    uint32_t length = (uint32_t)strlen(word);
    uint32_t best_distance = 1 + FT_MAX(2u, length / 3);
    for (uint32_t i = 0; i < count; i++) {
        /* A word that begins another (--temp) is what somebody types from memory. */
        uint32_t distance =
            length >= 3 && !strncmp(word, candidates[i], length) ? 1 : edit_distance(word, candidates[i]);
        if (distance < best_distance) {
            best_distance = distance;
            best = candidates[i];
        }
    }
    return best;
}

static const struct ft_option *find_option(const struct ft_option_set *set, const char *name, size_t bytes,
                                           void **target)
{
    for (uint32_t g = 0; g < set->group_count; g++)
        for (uint32_t i = 0; i < set->groups[g].count; i++) {
            const struct ft_option *option = &set->groups[g].options[i];
            if (strlen(option->name) == bytes && !memcmp(option->name, name, bytes)) {
                *target = set->groups[g].target;
                return option;
            }
        }
    return NULL;
}

static int refuse_name(const struct ft_option_set *set, const char *argument, struct ft_error *err)
{
    const char *names[CANDIDATES_MAX] = {"help"};
    char word[NAME_MAX_BYTES];
    uint32_t count = 1;
    for (uint32_t g = 0; g < set->group_count; g++)
        for (uint32_t i = 0; i < set->groups[g].count && count < CANDIDATES_MAX; i++)
            names[count++] = set->groups[g].options[i].name;
    const char *bare = argument + strspn(argument, "-");
    snprintf(word, sizeof word, "%.*s", (int)FT_MIN(strcspn(bare, "="), sizeof word - 1), bare);
    const char *closest = ft_options_find_closest(word, names, count);
    if (closest)
        return ft_error_set(err, FT_USAGE, "unknown option %s; did you mean --%s?", argument, closest);
    return ft_error_set(err, FT_USAGE, "unknown option %s; %s --help lists them", argument, set->command);
}

/* ---- the command line ---- */

/* Parses the option at argv[*at] and moves *at past it and its value. */
static int parse_option(const struct ft_option_set *set, int argc, char **argv, int *at, struct ft_error *err)
{
    const char *name = argv[*at] + 2;
    size_t bytes = strcspn(name, "=");
    void *target = NULL;
    const struct ft_option *option = find_option(set, name, bytes, &target);
    if (!option)
        return refuse_name(set, argv[*at], err);
    bool takes_value = option->kind != FT_OPTION_FLAG && option->kind != FT_OPTION_CLEAR;
    const char *value = name[bytes] ? name + bytes + 1 : NULL;
    if (value && !takes_value)
        return ft_error_set(err, FT_USAGE, "--%s takes no value (found \"%s\")", option->name, value);
    *at += 1;
    if (takes_value && !value) {
        void *other;
        /* `--model --json`: the value was forgotten, and --json is not the name of a model. */
        bool is_option = *at < argc && !strncmp(argv[*at], "--", 2) &&
                         find_option(set, argv[*at] + 2, strcspn(argv[*at] + 2, "="), &other);
        if (*at >= argc || is_option)
            return ft_error_set(err, FT_USAGE, "--%s needs a value (%s)", option->name, option->value);
        value = argv[*at];
        *at += 1;
    }
    int status = store_value(option, (char *)target + option->field, value, err);
    if (status == FT_OK && option->given != FT_OPTION_NO_FIELD)
        *(bool *)((char *)target + option->given) = true;
    return status;
}

static int push_positional(const struct ft_option_set *set, const char *argument, struct ft_option_rest *rest,
                           struct ft_error *err)
{
    if (rest->count == set->positional_max || rest->count == FT_OPTION_LIST_MAX)
        return ft_error_set(err, FT_USAGE, "unexpected argument \"%s\"; usage: %s %s", argument, set->command,
                            set->usage);
    rest->items[rest->count++] = argument;
    return FT_OK;
}

int ft_options_parse(const struct ft_option_set *set, int argc, char **argv, struct ft_option_rest *rest,
                     struct ft_error *err)
{
    bool options_ended = false;
    memset(rest, 0, sizeof *rest);
    for (int at = 0; at < argc;) {
        const char *argument = argv[at];
        int status = FT_OK;
        if (options_ended || argument[0] != '-' || !argument[1]) {
            status = push_positional(set, argument, rest, err);
            at++;
        } else if (!strcmp(argument, "--")) {
            options_ended = true;
            at++;
        } else if (!strcmp(argument, "--help") || !strcmp(argument, "-h")) {
            rest->help = true;
            return FT_OK;
        } else if (argument[1] != '-') {
            status = refuse_name(set, argument, err);
        } else {
            status = parse_option(set, argc, argv, &at, err);
        }
        if (status != FT_OK)
            return status;
    }
    return FT_OK;
}

/* ---- help ---- */

/* The value in the struct as text; "" when there is nothing worth saying. */
static void format_default(const struct ft_option *option, const void *target, char *text, size_t cap)
{
    text[0] = '\0';
    switch (option->kind) {
    case FT_OPTION_U32:
        snprintf(text, cap, "%u", *(const uint32_t *)target);
        break;
    case FT_OPTION_U64:
        snprintf(text, cap, "%llu", (unsigned long long)*(const uint64_t *)target);
        break;
    case FT_OPTION_BYTES:
        ft_options_format_bytes(*(const uint64_t *)target, text, cap);
        break;
    case FT_OPTION_F64:
        snprintf(text, cap, "%g", *(const double *)target);
        break;
    case FT_OPTION_F32:
        snprintf(text, cap, "%g", (double)*(const float *)target);
        break;
    case FT_OPTION_STRING:
        snprintf(text, cap, "%s", *(const char *const *)target ? *(const char *const *)target : "");
        break;
    case FT_OPTION_CHOICE:
        choice_word(option->value, *(const uint32_t *)target, text, cap);
        break;
    case FT_OPTION_FLAG:
    case FT_OPTION_CLEAR:
    case FT_OPTION_LIST:
    case FT_OPTION_U32_LIST:
    case FT_OPTION_BYTES_LIST:
        break;
    }
}

static void print_option(const struct ft_option *option, const void *target, FILE *out)
{
    char left[96], value[96];
    snprintf(left, sizeof left, "--%s%s%s", option->name, option->value ? " " : "",
             option->value ? option->value : "");
    if (option->fallback)
        snprintf(value, sizeof value, "%s", option->fallback);
    else
        format_default(option, (const char *)target + option->field, value, sizeof value);
    if (strlen(left) > 26)
        fprintf(out, "  %s\n  %-26s %s", left, "", option->help);
    else
        fprintf(out, "  %-26s %s", left, option->help);
    if (value[0])
        fprintf(out, " [default: %s]", value);
    fputc('\n', out);
}

void ft_options_print_help(const struct ft_option_set *set, FILE *out)
{
    fprintf(out, "usage: %s %s\n\n%s\n", set->command, set->usage, set->about);
    for (uint32_t g = 0; g < set->group_count; g++) {
        fprintf(out, "\n%s:\n", set->groups[g].title);
        for (uint32_t i = 0; i < set->groups[g].count; i++)
            print_option(&set->groups[g].options[i], set->groups[g].target, out);
    }
    fprintf(out, "  %-26s %s\n", "--help", "this text");
}
