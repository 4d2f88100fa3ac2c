/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.json -> the tables of struct ft_tokenizer. Everything in the file that would change ids and is
 * not known here is refused by name; what only concerns offsets, padding or truncation is passed over.
 */
#include "io/tokenizer_internal.h"

#include <jansson.h>

#include <stdlib.h>
#include <string.h>

/* The value of a key, where null and absent are the same. */
static json_t *find_key(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static const char *json_kind(const json_t *value)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a number",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",        [JSON_NULL] = "null"};
    return value ? names[json_typeof(value)] : "nothing";
}

static int wrong_kind(const char *what, const json_t *found, const char *wanted, struct ft_error *err)
{
    return ft_error_set(err, FT_FORMAT, "%s is %s; %s was expected", what, json_kind(found), wanted);
}

static int read_bool(const json_t *object, const char *key, bool missing, bool *out, struct ft_error *err)
{
    const json_t *value = find_key(object, key);
    *out = value ? json_is_true(value) : missing;
    return !value || json_is_boolean(value) ? FT_OK : wrong_kind(key, value, "true or false", err);
}

/* The "type" of a component; "?" when there is none. */
static const char *type_of(const json_t *component)
{
    const char *type = json_string_value(json_object_get(component, "type"));
    return type ? type : "?";
}

static bool is_type(const json_t *component, const char *type)
{
    return strcmp(type_of(component), type) == 0;
}

/* ---- model ---- */

static int check_model(const json_t *model, struct ft_error *err)
{
    bool byte_fallback;
    if (!json_is_object(model))
        return wrong_kind("model", model, "an object", err);
    if (json_object_get(model, "type") && !is_type(model, "BPE"))
        return ft_error_set(err, FT_UNSUPPORTED,
                            "the model is of type %.64s; only byte-level BPE tokenizers can be read",
                            type_of(model));
    if (!json_is_object(json_object_get(model, "vocab")))
        return wrong_kind("model.vocab", json_object_get(model, "vocab"), "an object of token: id (BPE)",
                          err);
    if (!json_is_array(json_object_get(model, "merges")))
        return wrong_kind("model.merges", json_object_get(model, "merges"), "an array", err);
    if (read_bool(model, "byte_fallback", false, &byte_fallback, err) != FT_OK)
        return err->code;
    if (byte_fallback)
        return ft_error_set(err, FT_UNSUPPORTED,
                            "the model is BPE with byte_fallback (SentencePiece style); only "
                            "byte-level BPE tokenizers can be read");
    const json_t *dropout = find_key(model, "dropout");
    if (dropout && json_number_value(dropout) != 0)
        return ft_error_set(err, FT_UNSUPPORTED,
                            "the model has dropout, which makes ids random; set it to null");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < 2; i++) {
        const json_t *affix = find_key(model, affixes[i]);
        if (affix && json_string_length(affix) > 0)
            return ft_error_set(err, FT_UNSUPPORTED, "the model has a %s, which byte-level BPE does not use",
                                affixes[i]);
    }
    return FT_OK;
}

/* An integer below FT_TOKENIZER_VOCAB_MAX. */
static int read_id(const json_t *value, const char *token, uint32_t *id, struct ft_error *err)
{
    json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0)
        return ft_error_set(err, FT_FORMAT, "the id of token \"%.64s\" is not an integer from 0 on", token);
    *id = n < FT_NONE ? (uint32_t)n : FT_NONE - 1; /* too large either way: refused when it is added */
    return FT_OK;
}

static int load_vocab(struct ft_tokenizer *tokenizer, json_t *vocab, size_t added_count, struct ft_error *err)
{
    const char *token;
    json_t *value;
    uint32_t id = 0;
    if (ft_vocabulary_init(&tokenizer->vocabulary, json_object_size(vocab) + added_count, err) != FT_OK)
        return err->code;
    json_object_foreach(vocab, token,
                        value) if (read_id(value, token, &id, err) != FT_OK ||
                                   ft_vocabulary_add(&tokenizer->vocabulary, token, strlen(token), id,
                                                     FT_TOKEN_MODEL, err) != FT_OK) return err->code;
    return FT_OK;
}

/* A merge is ["a", "b"], or "a b" with exactly one space. */
static int split_merge(const json_t *merge, size_t rank, const char *text[2], size_t bytes[2],
                       struct ft_error *err)
{
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (size_t i = 0; i < 2; i++) {
            text[i] = json_string_value(json_array_get(merge, i));
            bytes[i] = json_string_length(json_array_get(merge, i));
        }
        if (text[0] && text[1])
            return FT_OK;
    } else if (json_is_string(merge)) {
        const char *space = strchr(json_string_value(merge), ' ');
        text[0] = json_string_value(merge);
        if (space && !strchr(space + 1, ' ')) {
            text[1] = space + 1;
            bytes[0] = (size_t)(space - text[0]);
            bytes[1] = json_string_length(merge) - bytes[0] - 1;
            return FT_OK;
        }
    }
    return ft_error_set(err, FT_FORMAT, "merge %zu is not \"a b\" or [\"a\", \"b\"]", rank);
}

static int load_merge(struct ft_tokenizer *tokenizer, const json_t *merge, size_t rank, struct ft_error *err)
{
    const struct ft_vocabulary *vocabulary = &tokenizer->vocabulary;
    const char *text[2];
    size_t bytes[2];
    uint32_t id[3];
    if (split_merge(merge, rank, text, bytes, err) != FT_OK)
        return err->code;
    char *joined = malloc(bytes[0] + bytes[1] + 1);
    if (!joined)
        return ft_error_set(err, FT_MEMORY, "no memory for merge %zu", rank);
    memcpy(joined, text[0], bytes[0]);
    memcpy(joined + bytes[0], text[1], bytes[1]);
    id[0] = ft_vocabulary_find(vocabulary, text[0], bytes[0]);
    id[1] = ft_vocabulary_find(vocabulary, text[1], bytes[1]);
    id[2] = ft_vocabulary_find(vocabulary, joined, bytes[0] + bytes[1]);
    free(joined);
    for (size_t i = 0; i < 3; i++)
        if (id[i] == FT_NONE)
            return ft_error_set(err, FT_FORMAT,
                                "merge %zu (\"%.64s\" + \"%.64s\"): %s is not in the vocabulary", rank,
                                text[0], text[1], i < 2 ? "a part" : "the merged token");
    ft_bpe_add_merge(&tokenizer->bpe, id[0], id[1], (uint32_t)rank, id[2]);
    return FT_OK;
}

static int load_merges(struct ft_tokenizer *tokenizer, const json_t *model, struct ft_error *err)
{
    const json_t *merges = json_object_get(model, "merges");
    size_t rank = 0;
    if (ft_bpe_init(&tokenizer->bpe, &tokenizer->vocabulary, json_array_size(merges), err) != FT_OK ||
        read_bool(model, "ignore_merges", false, &tokenizer->bpe.ignore_merges, err) != FT_OK ||
        read_bool(model, "fuse_unk", false, &tokenizer->bpe.fuse_unk, err) != FT_OK)
        return err->code;
    const json_t *unk = find_key(model, "unk_token");
    if (unk && !json_is_string(unk))
        return wrong_kind("model.unk_token", unk, "a string", err);
    if (unk)
        tokenizer->bpe.unk_id =
            ft_vocabulary_find(&tokenizer->vocabulary, json_string_value(unk), json_string_length(unk));
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);
        if (json_is_string(merge) && strncmp(json_string_value(merge), "#version", 8) == 0)
            continue; /* the first line of a merges.txt */
        if (load_merge(tokenizer, merge, rank++, err) != FT_OK)
            return err->code;
    }
    return FT_OK;
}

/* ---- added tokens ---- */

struct added {
    const char *text; /* borrowed from the JSON */
    size_t bytes;
    uint32_t id;
    uint8_t flags;
    bool normalized;
};

static int read_added(const json_t *token, size_t index, struct added *a, struct ft_error *err)
{
    static const struct {
        const char *key;
        uint8_t flag;
    } keys[] = {{"special", FT_TOKEN_SPECIAL},
                {"single_word", FT_TOKEN_SINGLE_WORD},
                {"lstrip", FT_TOKEN_LSTRIP},
                {"rstrip", FT_TOKEN_RSTRIP}};
    const json_t *content = json_object_get(token, "content");
    if (!json_is_string(content))
        return ft_error_set(err, FT_FORMAT, "added_tokens[%zu].content is %s; a string was expected", index,
                            json_kind(content));
    *a = (struct added){.text = json_string_value(content), .bytes = json_string_length(content)};
    a->flags = FT_TOKEN_ADDED;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        bool set;
        if (read_bool(token, keys[i].key, false, &set, err) != FT_OK)
            return ft_error_prepend(err, "added_tokens[%zu]", index);
        a->flags |= set ? keys[i].flag : 0;
    }
    /* Absent, "normalized" is the opposite of special. */
    if (read_bool(token, "normalized", !(a->flags & FT_TOKEN_SPECIAL), &a->normalized, err) != FT_OK)
        return ft_error_prepend(err, "added_tokens[%zu]", index);
    return read_id(json_object_get(token, "id"), a->text, &a->id, err);
}

/* Two tries, special tokens first, so that of two tokens that normalise to the same text the special one is found. */
static int build_tries(struct ft_tokenizer *tokenizer, const struct added *added, size_t count,
                       struct ft_error *err)
{
    char **normal = calloc(count + 1, sizeof *normal);
    size_t *normal_bytes = calloc(count + 1, sizeof *normal_bytes);
    size_t total[2] = {0, 0};
    int status = normal && normal_bytes
                     ? FT_OK
                     : ft_error_set(err, FT_MEMORY, "no memory for %zu added tokens", count);
    for (size_t i = 0; status == FT_OK && i < count; i++) {
        normal_bytes[i] = added[i].bytes;
        if (added[i].normalized && tokenizer->nfc)
            status = ft_normalize_nfc(added[i].text, added[i].bytes, &normal[i], &normal_bytes[i], err);
        total[added[i].normalized] += normal_bytes[i];
    }
    if (status == FT_OK)
        status = ft_token_trie_init(&tokenizer->written, total[0], err);
    if (status == FT_OK)
        status = ft_token_trie_init(&tokenizer->normalized, total[1], err);
    for (int special = 1; status == FT_OK && special >= 0; special--)
        for (size_t i = 0; i < count; i++)
            if (!!(added[i].flags & FT_TOKEN_SPECIAL) == special)
                ft_token_trie_add(added[i].normalized ? &tokenizer->normalized : &tokenizer->written,
                                  normal[i] ? normal[i] : added[i].text, normal_bytes[i], added[i].id);
    for (size_t i = 0; normal && i < count; i++)
        free(normal[i]);
    free(normal);
    free(normal_bytes);
    return status;
}

static int load_added(struct ft_tokenizer *tokenizer, const json_t *tokens, struct ft_error *err)
{
    size_t count = json_array_size(tokens);
    struct added *added = calloc(count + 1, sizeof *added);
    if (!added)
        return ft_error_set(err, FT_MEMORY, "no memory for %zu added tokens", count);
    int status = FT_OK;
    for (size_t i = 0; status == FT_OK && i < count; i++) {
        struct added *a = &added[i];
        status = read_added(json_array_get(tokens, i), i, a, err);
        if (status != FT_OK ||
            a->bytes == 0) /* an empty token can never be found; the reference ignores it too */
            continue;
        /* A token of the model keeps the model's id, whatever is written here, as in the reference. */
        uint32_t known = ft_vocabulary_find(&tokenizer->vocabulary, a->text, a->bytes);
        if (known != FT_NONE)
            a->id = known;
        status = ft_vocabulary_add(&tokenizer->vocabulary, a->text, a->bytes, a->id, a->flags, err);
    }
    if (status == FT_OK)
        status = build_tries(tokenizer, added, count, err);
    free(added);
    return status;
}

/* ---- normalizer, pre-tokenizer, decoder, post-processor ---- */

/* Calls `one` for a component, or for each component of a Sequence (which nests no deeper than 4). */
typedef int (*component_fn)(struct ft_tokenizer *tokenizer, const json_t *component, struct ft_error *err);
static int for_each(struct ft_tokenizer *tokenizer, const json_t *component, const char *what,
                    const char *list_key, component_fn one, int depth, struct ft_error *err)
{
    if (!component || json_is_null(component))
        return FT_OK;
    if (!json_is_object(component))
        return wrong_kind(what, component, "an object or null", err);
    if (!is_type(component, "Sequence"))
        return one(tokenizer, component, err);
    const json_t *list = json_object_get(component, list_key);
    if (!json_is_array(list))
        return ft_error_set(err, FT_FORMAT, "the Sequence of %s has no array \"%s\"", what, list_key);
    if (depth == 4)
        return ft_error_set(err, FT_UNSUPPORTED, "%s has Sequences nested more than 4 deep", what);
    for (size_t i = 0; i < json_array_size(list); i++)
        if (for_each(tokenizer, json_array_get(list, i), what, list_key, one, depth + 1, err) != FT_OK)
            return err->code;
    return FT_OK;
}

static int load_normalizer(struct ft_tokenizer *tokenizer, const json_t *normalizer, struct ft_error *err)
{
    if (!is_type(normalizer, "NFC"))
        return ft_error_set(err, FT_UNSUPPORTED, "the normalizer is of type %.64s; NFC or none can be used",
                            type_of(normalizer));
    tokenizer->nfc = true;
    return FT_OK;
}

static int load_split(struct ft_split *split, const json_t *component, struct ft_error *err)
{
    const json_t *pattern = json_object_get(component, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex"), *string = json_object_get(pattern, "String");
    const char *behavior = json_string_value(json_object_get(component, "behavior"));
    split->removed = behavior && strcmp(behavior, "Removed") == 0;
    if (!behavior || (!split->removed && strcmp(behavior, "Isolated") != 0))
        return ft_error_set(err, FT_UNSUPPORTED,
                            "a Split has the behavior %.64s; Isolated and Removed can be used",
                            behavior ? behavior : "?");
    if (read_bool(component, "invert", false, &split->invert, err) != FT_OK)
        return err->code;
    if (json_is_string(regex)) {
        split->kind = FT_SPLIT_REGEX;
        return ft_regex_compile(&split->regex, json_string_value(regex), json_string_length(regex), err);
    }
    if (!json_is_string(string))
        return ft_error_set(err, FT_FORMAT,
                            "the pattern of a Split is neither {\"Regex\": ...} nor {\"String\": ...}");
    split->kind = FT_SPLIT_STRING;
    split->string_bytes = json_string_length(string);
    split->string = malloc(split->string_bytes + 1);
    if (!split->string)
        return ft_error_set(err, FT_MEMORY, "no memory for a Split");
    memcpy(split->string, json_string_value(string), split->string_bytes + 1);
    return FT_OK;
}

static int load_pre_tokenizer(struct ft_tokenizer *tokenizer, const json_t *component, struct ft_error *err)
{
    bool use_regex;
    uint32_t count = tokenizer->split_count;
    if (count == FT_SPLITS_MAX)
        return ft_error_set(err, FT_LIMIT, "there are more than %d pre-tokenizers", FT_SPLITS_MAX);
    if (count && tokenizer->splits[count - 1].kind == FT_SPLIT_BYTE_LEVEL)
        return ft_error_set(err, FT_UNSUPPORTED,
                            "the pre-tokenizer %.64s comes after ByteLevel, which has to be the last one",
                            type_of(component));
    struct ft_split *split = &tokenizer->splits[tokenizer->split_count++];
    if (is_type(component, "Split"))
        return load_split(split, component, err);
    if (!is_type(component, "ByteLevel"))
        return ft_error_set(err, FT_UNSUPPORTED,
                            "the pre-tokenizer is of type %.64s; Split and ByteLevel can be used",
                            type_of(component));
    split->kind = FT_SPLIT_BYTE_LEVEL;
    if (read_bool(component, "add_prefix_space", true, &split->add_prefix_space, err) != FT_OK ||
        read_bool(component, "use_regex", true, &use_regex, err) != FT_OK)
        return err->code;
    return use_regex ? ft_pretokenize_gpt2(&split->regex, err) : FT_OK;
}

static int load_decoder(struct ft_tokenizer *tokenizer, const json_t *decoder, struct ft_error *err)
{
    (void)tokenizer;
    if (is_type(decoder, "ByteLevel"))
        return FT_OK;
    return ft_error_set(err, FT_UNSUPPORTED, "the decoder is of type %.64s; ByteLevel can be used",
                        type_of(decoder));
}

/* ByteLevel only moves offsets; TemplateProcessing may name a token before the text. */
static int load_post_processor(struct ft_tokenizer *tokenizer, const json_t *processor, struct ft_error *err)
{
    if (is_type(processor, "ByteLevel"))
        return FT_OK;
    if (!is_type(processor, "TemplateProcessing"))
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "the post_processor is of type %.64s; ByteLevel and TemplateProcessing can be used",
            type_of(processor));
    const json_t *first = json_array_get(json_object_get(processor, "single"), 0);
    const json_t *name = json_object_get(json_object_get(first, "SpecialToken"), "id");
    if (!json_is_string(name))
        return FT_OK;
    tokenizer->bos_id =
        ft_vocabulary_find(&tokenizer->vocabulary, json_string_value(name), json_string_length(name));
    if (tokenizer->bos_id == FT_NONE)
        return ft_error_set(err, FT_FORMAT,
                            "the post_processor puts \"%.64s\" before a text, which is not a token",
                            json_string_value(name));
    return FT_OK;
}

static int load_parts(struct ft_tokenizer *tokenizer, const json_t *root, struct ft_error *err)
{
    const json_t *model = json_object_get(root, "model"), *added = find_key(root, "added_tokens");
    if (check_model(model, err) != FT_OK)
        return err->code;
    if (added && !json_is_array(added))
        return wrong_kind("added_tokens", added, "an array", err);
    if (for_each(tokenizer, json_object_get(root, "normalizer"), "normalizer", "normalizers", load_normalizer,
                 0, err) != FT_OK ||
        for_each(tokenizer, json_object_get(root, "pre_tokenizer"), "pre_tokenizer", "pretokenizers",
                 load_pre_tokenizer, 0, err) != FT_OK ||
        for_each(tokenizer, json_object_get(root, "decoder"), "decoder", "decoders", load_decoder, 0, err) !=
            FT_OK)
        return err->code;
    uint32_t splits = tokenizer->split_count;
    if (!splits || tokenizer->splits[splits - 1].kind != FT_SPLIT_BYTE_LEVEL)
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "the pre_tokenizer does not end with ByteLevel; only byte-level BPE tokenizers can be read");
    if (load_vocab(tokenizer, json_object_get(model, "vocab"), json_array_size(added), err) != FT_OK ||
        load_merges(tokenizer, model, err) != FT_OK || load_added(tokenizer, added, err) != FT_OK)
        return err->code;
    return for_each(tokenizer, json_object_get(root, "post_processor"), "post_processor", "processors",
                    load_post_processor, 0, err);
}

int ft_tokenizer_load(struct ft_tokenizer *tokenizer, const char *json, size_t bytes, struct ft_error *err)
{
    json_error_t where;
    tokenizer->bos_id = FT_NONE;
    json_t *root = json_loadb(json, bytes, JSON_ALLOW_NUL, &where);
    if (!root)
        return ft_error_set(err, FT_FORMAT, "is not JSON: line %d: %s", where.line, where.text);
    int status = json_is_object(root) ? load_parts(tokenizer, root, err)
                                      : wrong_kind("the file", root, "an object", err);
    json_decref(root);
    return status;
}
