/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a safetensors file: seeds in tests/data/fuzz/safetensors. */
#include "io/safetensors.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct ft_safetensors st;
    struct ft_error err;
    if (ft_safetensors_parse(&st, (const char *)data, bytes, bytes, "fuzz", &err) != FT_OK)
        return 0;
    /* What was accepted must be inside the file, sorted and disjoint: read every byte. */
    uint64_t end = 0;
    volatile uint8_t sum = 0;
    for (uint32_t i = 0; i < st.count; i++) {
        const struct ft_tensor *tensor = &st.tensors[i];
        char shape[64];
        ft_shape_print(tensor->shape, tensor->rank, shape, sizeof shape);
        if (tensor->bytes && tensor->offset < end)
            abort();
        for (uint64_t k = 0; k < tensor->bytes; k++)
            sum = (uint8_t)(sum + data[tensor->offset + k]);
        end = FT_MAX(end, tensor->offset + tensor->bytes);
    }
    ft_safetensors_close(&st);
    return 0;
}
