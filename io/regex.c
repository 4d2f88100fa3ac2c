/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PCRE2 behind two functions. Texts are known to be valid UTF-8 here, so PCRE2 never checks them again (it
 * would do so from the start at every search). Steps and memory of one search are bounded, so that no text
 * can hang it.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "io/tokenizer_internal.h"

#include <pcre2.h>

#include <stdlib.h>

#define MATCH_STEPS_MIN 10000000u /* PCRE2's own default; longer texts get more: backing out of a long run */
#define HEAP_KIB_MAX (256u << 10) /* of the interpreter */
#define JIT_STACK_BYTES_MAX ((size_t)8 << 20)

struct ft_regex {
    pcre2_code *code;
};

/* For one thread at a time; fits every pattern, because only the ends of the whole match are read. */
struct ft_regex_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack; /* NULL without JIT */
};

int ft_regex_compile(struct ft_regex **out, const char *pattern, size_t bytes, struct ft_error *err)
{
    char *translated;
    size_t translated_bytes, offset = 0;
    int code = 0;
    *out = NULL;
    if (ft_regex_translate(pattern, bytes, &translated, &translated_bytes, err) != FT_OK)
        return err->code;
    struct ft_regex *regex = malloc(sizeof *regex);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!regex || !context) {
        free(translated);
        free(regex);
        pcre2_compile_context_free(context);
        return ft_error_set(err, FT_MEMORY, "no memory to compile a regular expression");
    }
    pcre2_set_newline(context,
                      PCRE2_NEWLINE_LF); /* as in Ruby: only \n is special to . ^ $, and ^ $ see lines */
    regex->code = pcre2_compile((PCRE2_SPTR)translated, translated_bytes,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &code, &offset, context);
    pcre2_compile_context_free(context);
    free(translated);
    if (!regex->code) {
        char message[256];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
        free(regex);
        return ft_error_set(err, FT_FORMAT, "the regular expression \"%.200s\" cannot be compiled: %s",
                            pattern, message);
    }
    pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE); /* on failure pcre2_match interprets */
    *out = regex;
    return FT_OK;
}

void ft_regex_free(struct ft_regex *regex)
{
    if (regex)
        pcre2_code_free(regex->code);
    free(regex);
}

void ft_regex_scratch_free(struct ft_regex_scratch *scratch)
{
    if (!scratch)
        return;
    pcre2_match_data_free(scratch->data);
    pcre2_match_context_free(scratch->context);
    pcre2_jit_stack_free(scratch->stack);
    free(scratch);
}

static int make_scratch(struct ft_regex_scratch **out, struct ft_error *err)
{
    struct ft_regex_scratch *scratch = calloc(1, sizeof *scratch);
    if (scratch) {
        scratch->data = pcre2_match_data_create(1, NULL);
        scratch->context = pcre2_match_context_create(NULL);
        scratch->stack = pcre2_jit_stack_create(32 << 10, JIT_STACK_BYTES_MAX, NULL);
    }
    if (!scratch || !scratch->data || !scratch->context) {
        ft_regex_scratch_free(scratch);
        return ft_error_set(err, FT_MEMORY, "no memory to run a regular expression");
    }
    pcre2_set_heap_limit(scratch->context, HEAP_KIB_MAX);
    if (scratch->stack)
        pcre2_jit_stack_assign(scratch->context, NULL, scratch->stack);
    *out = scratch;
    return FT_OK;
}

int ft_regex_search(const struct ft_regex *regex, struct ft_regex_scratch **scratch, const char *text,
                    size_t bytes, size_t from, bool *found, size_t *start, size_t *end, struct ft_error *err)
{
    if (!*scratch && make_scratch(scratch, err) != FT_OK)
        return err->code;
    struct ft_regex_scratch *s = *scratch;
    pcre2_set_match_limit(s->context, MATCH_STEPS_MIN + 4 * (uint32_t)bytes);
    int code =
        pcre2_match(regex->code, (PCRE2_SPTR)text, bytes, from, PCRE2_NO_UTF_CHECK, s->data, s->context);
    if (code == PCRE2_ERROR_JIT_STACKLIMIT)
        code = pcre2_match(regex->code, (PCRE2_SPTR)text, bytes, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                           s->data, s->context);
    *found = code >= 0;
    if (code >= 0) {
        *start = pcre2_get_ovector_pointer(s->data)[0];
        *end = pcre2_get_ovector_pointer(s->data)[1];
    }
    if (code >= 0 || code == PCRE2_ERROR_NOMATCH)
        return FT_OK;
    char message[256];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
    return ft_error_set(
        err, FT_LIMIT,
        "the pre-tokenizer's regular expression gives up on this text (%zu bytes, from byte %zu on): %s; "
        "shorten the text, or put line breaks into it",
        bytes, from, message);
}
