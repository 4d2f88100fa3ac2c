/* SPDX-License-Identifier: Apache-2.0 */
/* Trace files as they come, and the same bytes with every frame signed again, so that the checksum hides nothing. */
#include "graph/trace.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void read_trace(const uint8_t *data, size_t bytes)
{
    struct ft_trace_reader reader;
    struct ft_trace_step step;
    struct ft_trace_record records[64];
    struct ft_error err;
    bool more = true;
    for (uint32_t cap = 0; cap <= 64; cap += 64) {
        int status = ft_trace_reader_open(&reader, data, bytes, &err);
        while (status == FT_OK && more)
            status = ft_trace_reader_next(&reader, &step, cap ? records : NULL, cap, &more, &err);
        more = true;
    }
}

static void sign_frames(uint8_t *data, size_t bytes)
{
    for (size_t at = 12; at + 12 <= bytes;) {
        uint32_t length, hash = 2166136261u;
        memcpy(&length, data + at + 4, 4);
        if (length > bytes - at - 12)
            return;
        for (size_t i = 0; i < length; i++)
            hash = (hash ^ data[at + 8 + i]) * 16777619u;
        memcpy(data + at + 8 + length, &hash, 4);
        at += (size_t)length + 12;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    read_trace(data, bytes);
    uint8_t *copy = malloc(bytes + 1);
    if (!copy)
        return 0;
    memcpy(copy, data, bytes);
    sign_frames(copy, bytes);
    read_trace(copy, bytes);
    free(copy);
    return 0;
}
