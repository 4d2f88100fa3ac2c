/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trace records, the preallocated per-thread rings they are written to, and the codec of trace files.
 *
 * Recording: one writer per ring, no lock, no allocation, no system call: <= 60 ns per job. A full ring drops the newest
 * records and counts them. Between steps the owner collects the rings into a frame.
 * File: magic "FTTRACE1", u32 schema, then frames: u32 kind, u32 payload bytes, payload, u32 checksum (FNV-1a of payload).
 * All integers little-endian. Kind 1 = header (model, plan, lanes), kind 2 = step. Unknown kinds are skipped.
 */
#ifndef FT_GRAPH_TRACE_H
#define FT_GRAPH_TRACE_H

#include "graph/error.h"
#include "graph/op.h"
#include "graph/policy.h"

enum ft_record_kind { FT_RECORD_JOB, FT_RECORD_WAIT, FT_RECORD_CHOICE };

/* 64 bytes. Times are ns since the session's clock started. */
struct ft_trace_record {
    uint64_t start_ns, end_ns;
    uint64_t bytes;        /* job: weights read or bytes moved */
    uint32_t job;          /* id in the graph; wait: the job waited for, or FT_NONE */
    uint32_t expert;       /* expert jobs and choices: expert id (of a group: the first), else FT_NONE */
    float predicted_ns;    /* 0 = no prediction */
    uint32_t slot;         /* choice: slot or victim, else FT_NONE */
    uint16_t layer;        /* UINT16_MAX outside layers */
    uint16_t thread;       /* who recorded it (trace ring number) */
    uint16_t rows;         /* rows computed; 65535 = that many or more */
    uint8_t kind;          /* enum ft_record_kind */
    uint8_t op;            /* enum ft_op */
    uint8_t lane;          /* enum ft_lane */
    uint8_t detail;        /* job, choice: enum ft_reason; wait: enum ft_wait */
    uint8_t place;         /* choice: enum ft_place */
    uint8_t flags;         /* bit 0: job was stolen; bit 1: skipped because the step had failed */
    uint8_t reserved[12];
};

/* Whether it is a copy of an expert that no layer had asked for yet. */
static inline bool ft_trace_is_ahead(const struct ft_trace_record *record)
{
    return record->kind == FT_RECORD_JOB && record->op == FT_OP_FETCH &&
           (record->detail == FT_REASON_PREFETCH || record->detail == FT_REASON_FORESEEN);
}

struct ft_trace_ring {
    struct ft_trace_record *records; /* [capacity] */
    uint32_t capacity, count, dropped;
    char pad[64 - sizeof(void *) - 12]; /* one writer per line */
};

static inline struct ft_trace_record *ft_trace_push(struct ft_trace_ring *ring)
{
    if (ring->count == ring->capacity) {
        ring->dropped++;
        return NULL;
    }
    return &ring->records[ring->count++];
}

#define FT_TRACE_THREADS_MAX (FT_WORKERS_MAX + 8)

/* Kind 1. */
struct ft_trace_header {
    char model[64], strategy[16], device[16], isa[16];
    uint32_t layer_count, expert_count, topk, workers, slot_count, thread_count;
    uint64_t expert_bytes;
    char thread_names[FT_TRACE_THREADS_MAX][16]; /* [thread_count] are written */
};

/* Kind 2. */
struct ft_trace_step {
    uint32_t step, rows, sequences, prefill /* 0 or 1 */, dropped, record_count;
    uint32_t layer_begin, layer_end; /* its layers; of a slice of a prefill not all */
    uint64_t begin_ns, end_ns;
    const struct ft_trace_record *records; /* [record_count] */
};

/* Encoding into a caller's buffer: returns bytes needed; writes only when cap is enough. The file starts with
 * ft_trace_encode_magic. */
uint64_t ft_trace_encode_magic(void *buffer, uint64_t cap);
uint64_t ft_trace_encode_header(const struct ft_trace_header *header, void *buffer, uint64_t cap);
uint64_t ft_trace_encode_step(const struct ft_trace_step *step, void *buffer, uint64_t cap);

/* Decoding of a whole file held in memory, frame by frame. FT_FORMAT says what is wrong and at which byte. */
struct ft_trace_reader {
    const uint8_t *data;
    uint64_t bytes, at;
    struct ft_trace_header header; /* filled by open */
};
int ft_trace_reader_open(struct ft_trace_reader *reader, const void *data, uint64_t bytes, struct ft_error *err);
/* Next step frame; records are copied to `records` [cap] (step->records points there). *more = false at the end.
 * With cap = 0 and records = NULL only the counts are filled and the frame is skipped. */
int ft_trace_reader_next(struct ft_trace_reader *reader, struct ft_trace_step *step, struct ft_trace_record *records,
                         uint32_t cap, bool *more, struct ft_error *err);

#endif
