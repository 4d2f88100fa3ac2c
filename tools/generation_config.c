/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/generation_config.h"

#include "io/chat.h"
#include "io/file.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_BYTES_MAX (1u << 20)

static int read_number(const json_t *root, const char *path, const char *key, double min, double max,
                       double *value, struct ft_error *err)
{
    const json_t *item = json_object_get(root, key);
    if (!item || json_is_null(item))
        return FT_OK;
    if (!json_is_number(item))
        return ft_error_set(err, FT_FORMAT, "%s: %s is not a number", path, key);
    double found = json_number_value(item);
    if (!(found >= min && found <= max))
        return ft_error_set(err, FT_FORMAT, "%s: %s is %g, outside %g .. %g", path, key, found, min, max);
    *value = found;
    return FT_OK;
}

static int read_sampling(struct ft_generation_config *config, const json_t *root, const char *path,
                         struct ft_error *err)
{
    double temperature = 1, top_k = 0, top_p = 1, min_p = 0, penalty = 1;
    int status = read_number(root, path, "temperature", 0, 1e6, &temperature, err);
    if (status == FT_OK)
        status = read_number(root, path, "top_k", 0, 1e9, &top_k, err);
    if (status == FT_OK)
        status = read_number(root, path, "top_p", 0, 1, &top_p, err);
    if (status == FT_OK)
        status = read_number(root, path, "min_p", 0, 1, &min_p, err);
    if (status == FT_OK)
        status = read_number(root, path, "repetition_penalty", 1e-3, 1e3, &penalty, err);
    const json_t *sample = json_object_get(root, "do_sample");
    config->sample = sample ? json_is_true(sample) : json_object_get(root, "temperature") != NULL;
    config->temperature = (float)temperature;
    config->top_k = (uint32_t)top_k;
    config->top_p = (float)top_p;
    config->min_p = (float)min_p;
    config->repetition_penalty = (float)penalty;
    return status;
}

int ft_generation_config_read(struct ft_generation_config *config, const char *dir, struct ft_error *err)
{
    char path[4200];
    char *text = NULL;
    uint64_t bytes = 0;
    json_error_t where;
    memset(config, 0, sizeof *config);
    config->temperature = config->top_p = config->repetition_penalty = 1;
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    int status = ft_chat_read_eos(dir, config->eos, &config->eos_count, err);
    if (status != FT_OK || access(path, F_OK) != 0)
        return status;
    status = ft_file_read_all(path, FILE_BYTES_MAX, &text, &bytes, err);
    if (status != FT_OK)
        return status;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!json_is_object(root)) {
        json_decref(root);
        return ft_error_set(err, FT_FORMAT, "%s: line %d: %s", path, root ? 1 : where.line,
                            root ? "is not an object" : where.text);
    }
    config->found = true;
    status = read_sampling(config, root, path, err);
    json_decref(root);
    return status;
}
