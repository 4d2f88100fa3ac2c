/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as model.safetensors.index.json: seeds in tests/data/fuzz/index. */
#include "io/shard_index.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct ft_shard_index index;
    struct ft_error err;
    /* A copy of its exact size: reading past its end is seen. */
    char *text = malloc(bytes + !bytes);
    if (!text)
        return 0;
    memcpy(text, data, bytes);
    if (ft_shard_index_parse(&index, text, bytes, "fuzz", &err) == FT_OK) {
        volatile uint8_t sum = 0;
        if (!index.count || !index.files.count || index.files.count > index.count)
            abort();
        for (uint32_t i = 0; i < index.count; i++) {
            if (index.entries[i].file >= index.files.count)
                abort();
            for (uint32_t k = 0; k < index.entries[i].name.bytes; k++)
                sum = (uint8_t)(sum + (uint8_t)index.entries[i].name.text[k]);
        }
        for (uint32_t i = 0; i < index.files.count; i++) {
            const struct ft_name *file = &index.files.names[i];
            if (!file->bytes || file->text[0] == '.' || memchr(file->text, '/', file->bytes))
                abort();
        }
        ft_shard_index_fini(&index);
    }
    free(text);
    return 0;
}
