/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codec of trace files. Fields are written one by one, little-endian, so a file does not depend on struct
 * layout. A record takes 64 bytes in the file as in memory.
 */
#include "graph/trace.h"

#include <string.h>

#define SCHEMA 2u
#define KIND_HEADER 1u
#define KIND_STEP 2u
#define MAGIC_BYTES 12u /* "FTTRACE1", u32 schema */
#define FRAME_BYTES 12u /* kind, payload bytes, checksum */
#define RECORD_BYTES 64u
#define STEP_BYTES 48u    /* payload in front of the records */
#define HEADER_BYTES 144u /* payload in front of the thread names */
#define NAME_BYTES 16u

static const char magic[8] = {'F', 'T', 'T', 'R', 'A', 'C', 'E', '1'};

/* ---- writing: the caller has made sure that there is room ---- */

static uint8_t *put_u16(uint8_t *at, uint16_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    return at + 2;
}

static uint8_t *put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
    return at + 4;
}

static uint8_t *put_u64(uint8_t *at, uint64_t value)
{
    return put_u32(put_u32(at, (uint32_t)value), (uint32_t)(value >> 32));
}

/* A string field: cut if necessary, always terminated, the rest zero. */
static uint8_t *put_text(uint8_t *at, const char *text, size_t bytes)
{
    size_t length = strnlen(text, bytes - 1);
    memset(at, 0, bytes);
    memcpy(at, text, length);
    return at + bytes;
}

static uint8_t *put_record(uint8_t *at, const struct ft_trace_record *record)
{
    uint32_t predicted;
    memcpy(&predicted, &record->predicted_ns, sizeof predicted);
    at = put_u64(put_u64(put_u64(at, record->start_ns), record->end_ns), record->bytes);
    at = put_u32(put_u32(put_u32(put_u32(at, record->job), record->expert), predicted), record->slot);
    at = put_u16(put_u16(put_u16(at, record->layer), record->thread), record->rows);
    const uint8_t tail[6] = {record->kind,   record->op,    record->lane,
                             record->detail, record->place, record->flags};
    memcpy(at, tail, sizeof tail);
    memset(at + sizeof tail, 0, 12);
    return at + sizeof tail + 12;
}

/* ---- reading: bounds are checked before ---- */

static uint16_t get_u16(const uint8_t *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

static uint32_t get_u32(const uint8_t *at)
{
    return (uint32_t)get_u16(at) | (uint32_t)get_u16(at + 2) << 16;
}

static uint64_t get_u64(const uint8_t *at)
{
    return (uint64_t)get_u32(at) | (uint64_t)get_u32(at + 4) << 32;
}

/* FNV-1a, 32 bits. Source: Fowler, Noll, Vo; the constants are theirs. */
static uint32_t checksum(const uint8_t *data, uint64_t bytes)
{
    uint32_t hash = 2166136261u;
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * 16777619u;
    return hash;
}

/* ---- encoding ---- */

uint64_t ft_trace_encode_magic(void *buffer, uint64_t cap)
{
    if (cap >= MAGIC_BYTES) {
        memcpy(buffer, magic, sizeof magic);
        put_u32((uint8_t *)buffer + sizeof magic, SCHEMA);
    }
    return MAGIC_BYTES;
}

static uint8_t *begin_frame(void *buffer, uint32_t kind, uint32_t payload_bytes)
{
    return put_u32(put_u32(buffer, kind), payload_bytes);
}

static void end_frame(void *buffer, uint32_t payload_bytes)
{
    uint8_t *payload = (uint8_t *)buffer + 8;
    put_u32(payload + payload_bytes, checksum(payload, payload_bytes));
}

uint64_t ft_trace_encode_header(const struct ft_trace_header *header, void *buffer, uint64_t cap)
{
    uint32_t threads = FT_MIN(header->thread_count, (uint32_t)FT_TRACE_THREADS_MAX);
    uint32_t payload = HEADER_BYTES + threads * NAME_BYTES;
    if (cap < payload + FRAME_BYTES)
        return payload + FRAME_BYTES;
    uint8_t *at = begin_frame(buffer, KIND_HEADER, payload);
    at = put_text(at, header->model, sizeof header->model);
    at = put_text(at, header->strategy, sizeof header->strategy);
    at = put_text(at, header->device, sizeof header->device);
    at = put_text(at, header->isa, sizeof header->isa);
    at = put_u32(put_u32(put_u32(at, header->layer_count), header->expert_count), header->topk);
    at = put_u32(put_u32(put_u32(at, header->workers), header->slot_count), threads);
    at = put_u64(at, header->expert_bytes);
    for (uint32_t i = 0; i < threads; i++)
        at = put_text(at, header->thread_names[i], NAME_BYTES);
    end_frame(buffer, payload);
    return payload + FRAME_BYTES;
}

uint64_t ft_trace_encode_step(const struct ft_trace_step *step, void *buffer, uint64_t cap)
{
    /* A frame's length is 32 bits; records beyond it count as dropped. */
    uint32_t count = FT_MIN(step->record_count, (UINT32_MAX - STEP_BYTES) / RECORD_BYTES);
    uint32_t payload = STEP_BYTES + count * RECORD_BYTES;
    uint64_t needed = (uint64_t)payload + FRAME_BYTES;
    if (cap < needed)
        return needed;
    uint8_t *at = begin_frame(buffer, KIND_STEP, payload);
    at = put_u32(put_u32(put_u32(at, step->step), step->rows), step->sequences);
    at = put_u32(put_u32(at, step->prefill != 0), step->dropped + (step->record_count - count));
    at = put_u64(put_u64(put_u32(at, count), step->begin_ns), step->end_ns);
    at = put_u32(put_u32(at, step->layer_begin), step->layer_end);
    for (uint32_t i = 0; i < count; i++)
        at = put_record(at, &step->records[i]);
    end_frame(buffer, payload);
    return needed;
}

/* ---- decoding ---- */

/* Finds the next frame, checks its length and checksum. *kind = 0 at the end of the file. The reader does not move. */
static int peek_frame(const struct ft_trace_reader *reader, uint32_t *kind, const uint8_t **payload,
                      uint32_t *bytes, struct ft_error *err)
{
    uint64_t left = reader->bytes - reader->at;
    const uint8_t *at = reader->data + reader->at;
    unsigned long long where = reader->at;
    *kind = 0;
    if (left == 0)
        return FT_OK;
    if (left < FRAME_BYTES)
        return ft_error_set(err, FT_FORMAT,
                            "trace: byte %llu: %llu bytes left, a frame takes at least %u: the file is "
                            "cut",
                            where, (unsigned long long)left, FRAME_BYTES);
    *bytes = get_u32(at + 4);
    if (*bytes > left - FRAME_BYTES)
        return ft_error_set(err, FT_FORMAT,
                            "trace: byte %llu: frame of %u bytes, but only %llu are left: the file is "
                            "cut",
                            where, *bytes, (unsigned long long)(left - FRAME_BYTES));
    *payload = at + 8;
    uint32_t found = get_u32(*payload + *bytes), wanted = checksum(*payload, *bytes);
    if (found != wanted)
        return ft_error_set(err, FT_FORMAT,
                            "trace: byte %llu: checksum of the frame is %08x, its bytes give %08x", where,
                            found, wanted);
    *kind = get_u32(at);
    if (*kind == 0)
        return ft_error_set(err, FT_FORMAT, "trace: byte %llu: frame of kind 0", where);
    return FT_OK;
}

static int get_text(const uint8_t **at, char *text, size_t bytes, const char *what, struct ft_error *err)
{
    memcpy(text, *at, bytes);
    *at += bytes;
    if (text[bytes - 1] != '\0')
        return ft_error_set(err, FT_FORMAT, "trace: the %s in the header is not terminated", what);
    return FT_OK;
}

static int decode_header(struct ft_trace_header *header, const uint8_t *at, uint32_t bytes,
                         struct ft_error *err)
{
    if (bytes < HEADER_BYTES)
        return ft_error_set(err, FT_FORMAT, "trace: header of %u bytes, wanted at least %u", bytes,
                            HEADER_BYTES);
    int status = get_text(&at, header->model, sizeof header->model, "model", err);
    if (status == FT_OK)
        status = get_text(&at, header->strategy, sizeof header->strategy, "strategy", err);
    if (status == FT_OK)
        status = get_text(&at, header->device, sizeof header->device, "device", err);
    if (status == FT_OK)
        status = get_text(&at, header->isa, sizeof header->isa, "isa", err);
    if (status != FT_OK)
        return status;
    header->layer_count = get_u32(at);
    header->expert_count = get_u32(at + 4);
    header->topk = get_u32(at + 8);
    header->workers = get_u32(at + 12);
    header->slot_count = get_u32(at + 16);
    header->thread_count = get_u32(at + 20);
    header->expert_bytes = get_u64(at + 24);
    if (header->layer_count > FT_LAYERS_MAX || header->expert_count > FT_EXPERTS_MAX)
        return ft_error_set(err, FT_FORMAT,
                            "trace: header says %u layers and %u experts, limits are %u and %u",
                            header->layer_count, header->expert_count, FT_LAYERS_MAX, FT_EXPERTS_MAX);
    if (header->thread_count > FT_TRACE_THREADS_MAX ||
        bytes != HEADER_BYTES + header->thread_count * NAME_BYTES)
        return ft_error_set(err, FT_FORMAT, "trace: header of %u bytes names %u threads", bytes,
                            header->thread_count);
    at += 32;
    for (uint32_t i = 0; i < header->thread_count && status == FT_OK; i++)
        status = get_text(&at, header->thread_names[i], NAME_BYTES, "thread name", err);
    return status;
}

static void get_record(const uint8_t *at, struct ft_trace_record *record)
{
    uint32_t predicted = get_u32(at + 32);
    *record = (struct ft_trace_record){.start_ns = get_u64(at),
                                       .end_ns = get_u64(at + 8),
                                       .bytes = get_u64(at + 16),
                                       .job = get_u32(at + 24),
                                       .expert = get_u32(at + 28),
                                       .slot = get_u32(at + 36),
                                       .layer = get_u16(at + 40),
                                       .thread = get_u16(at + 42),
                                       .rows = get_u16(at + 44),
                                       .kind = at[46],
                                       .op = at[47],
                                       .lane = at[48],
                                       .detail = at[49],
                                       .place = at[50],
                                       .flags = at[51]};
    memcpy(&record->predicted_ns, &predicted, sizeof predicted);
}

static bool is_record_legal(const struct ft_trace_record *record)
{
    uint32_t details = record->kind == FT_RECORD_WAIT ? (uint32_t)FT_WAIT_COUNT : (uint32_t)FT_REASON_COUNT;
    return record->kind <= FT_RECORD_CHOICE && record->op < FT_OP_COUNT && record->lane < FT_LANE_COUNT &&
           record->detail < details && record->place < FT_PLACE_COUNT && record->end_ns >= record->start_ns &&
           (record->layer < FT_LAYERS_MAX || record->layer == UINT16_MAX);
}

static int decode_step(struct ft_trace_step *step, const uint8_t *at, uint32_t bytes,
                       struct ft_trace_record *records, uint32_t cap, uint64_t where, struct ft_error *err)
{
    unsigned long long byte = where;
    if (bytes < STEP_BYTES)
        return ft_error_set(err, FT_FORMAT, "trace: byte %llu: step of %u bytes, wanted at least %u", byte,
                            bytes, STEP_BYTES);
    struct ft_trace_step found = {.step = get_u32(at),
                                  .rows = get_u32(at + 4),
                                  .sequences = get_u32(at + 8),
                                  .prefill = get_u32(at + 12),
                                  .dropped = get_u32(at + 16),
                                  .record_count = get_u32(at + 20),
                                  .begin_ns = get_u64(at + 24),
                                  .end_ns = get_u64(at + 32),
                                  .layer_begin = get_u32(at + 40),
                                  .layer_end = get_u32(at + 44)};
    if (found.prefill > 1 || found.end_ns < found.begin_ns)
        return ft_error_set(err, FT_FORMAT,
                            "trace: byte %llu: step %u has prefill %u and ends before it begins or is "
                            "neither prefill nor decode",
                            byte, found.step, found.prefill);
    if (found.layer_begin > found.layer_end || found.layer_end > FT_LAYERS_MAX)
        return ft_error_set(err, FT_FORMAT, "trace: byte %llu: step %u has layers %u to %u", byte, found.step,
                            found.layer_begin, found.layer_end);
    if ((uint64_t)found.record_count * RECORD_BYTES != bytes - STEP_BYTES)
        return ft_error_set(err, FT_FORMAT,
                            "trace: byte %llu: step %u announces %u records of %u bytes in %u bytes", byte,
                            found.step, found.record_count, RECORD_BYTES, bytes - STEP_BYTES);
    if (!records && cap == 0) {
        *step = found;
        return FT_OK;
    }
    if (found.record_count > cap)
        return ft_error_set(err, FT_LIMIT, "trace: step %u has %u records, the caller has room for %u",
                            found.step, found.record_count, cap);
    for (uint32_t i = 0; i < found.record_count; i++) {
        get_record(at + STEP_BYTES + (size_t)i * RECORD_BYTES, &records[i]);
        if (!is_record_legal(&records[i]))
            return ft_error_set(err, FT_FORMAT,
                                "trace: byte %llu: record %u of step %u has a field out of range", byte, i,
                                found.step);
    }
    found.records = records;
    *step = found;
    return FT_OK;
}

int ft_trace_reader_open(struct ft_trace_reader *reader, const void *data, uint64_t bytes,
                         struct ft_error *err)
{
    uint32_t kind, payload_bytes;
    const uint8_t *payload;
    *reader = (struct ft_trace_reader){.data = data, .bytes = bytes, .at = MAGIC_BYTES};
    if (bytes < MAGIC_BYTES || memcmp(data, magic, sizeof magic) != 0)
        return ft_error_set(err, FT_FORMAT, "trace: byte 0: no \"FTTRACE1\": this is not a trace file");
    if (get_u32(reader->data + sizeof magic) != SCHEMA)
        return ft_error_set(err, FT_UNSUPPORTED,
                            "trace: schema %u, this build reads %u: record the trace again",
                            get_u32(reader->data + sizeof magic), SCHEMA);
    for (;;) {
        int status = peek_frame(reader, &kind, &payload, &payload_bytes, err);
        if (status != FT_OK)
            return status;
        if (kind == 0 || kind == KIND_STEP)
            return ft_error_set(err, FT_FORMAT, "trace: byte %llu: %s before a header frame",
                                (unsigned long long)reader->at, kind ? "a step" : "the file ends");
        reader->at += (uint64_t)payload_bytes + FRAME_BYTES;
        if (kind == KIND_HEADER)
            return decode_header(&reader->header, payload, payload_bytes, err);
    }
}

int ft_trace_reader_next(struct ft_trace_reader *reader, struct ft_trace_step *step,
                         struct ft_trace_record *records, uint32_t cap, bool *more, struct ft_error *err)
{
    uint32_t kind, bytes;
    const uint8_t *payload;
    *more = false;
    for (;;) {
        int status = peek_frame(reader, &kind, &payload, &bytes, err);
        if (status != FT_OK || kind == 0)
            return status;
        if (kind == KIND_HEADER)
            return ft_error_set(err, FT_FORMAT, "trace: byte %llu: a second header: two traces in one file",
                                (unsigned long long)reader->at);
        if (kind == KIND_STEP)
            status = decode_step(step, payload, bytes, records, cap, reader->at, err);
        if (status != FT_OK)
            return status;
        reader->at += (uint64_t)bytes + FRAME_BYTES;
        if (kind == KIND_STEP) {
            *more = true;
            return FT_OK;
        }
    }
}
