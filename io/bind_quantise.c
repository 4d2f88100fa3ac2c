/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrices that are quantised while they are loaded. A block needs 128 rows, and rows come in pieces, in any
 * order, from several threads: each band of 128 rows gathers in a buffer of its own, which lives from its
 * first byte to its last. Who brings the last byte quantises the band straight into the arena.
 */
#include "io/bind_internal.h"
#include "io/quantise.h"

#include <pthread.h>
#include <stdlib.h>

struct quantised {
    uint64_t data_at, scale_at; /* in the arena */
    uint64_t band_first;        /* in bands */
    uint32_t out, in;
    enum ft_format format; /* what gathers: bf16 or f32 */
};

struct band {
    char *rows;   /* NULL: no byte yet, or done */
    uint64_t got; /* bytes of rows */
};

struct ft_quantiser {
    struct quantised *matrices; /* [count] */
    uint32_t count, room;
    uint64_t band_count;
    pthread_mutex_t lock; /* of the bands */
    struct band *bands;   /* [band_count] */
};

static struct ft_quantiser *create(void)
{
    struct ft_quantiser *q = calloc(1, sizeof *q);
    if (q)
        pthread_mutex_init(&q->lock, NULL);
    return q;
}

int ft_quantiser_add(struct ft_bind *bind, enum ft_format format, uint32_t out, uint32_t in, uint64_t data_at,
                     uint64_t scale_at, uint32_t *number, struct ft_error *err)
{
    struct ft_quantiser *q = bind->quantiser ? bind->quantiser : create();
    bind->quantiser = q;
    if (q && q->count == q->room) {
        uint32_t room = q->room ? q->room * 2 : 64;
        struct quantised *matrices = realloc(q->matrices, room * sizeof *matrices);
        q->matrices = matrices ? matrices : q->matrices;
        q->room = matrices ? room : q->room;
    }
    if (!q || q->count == q->room)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for the list of matrices to quantise",
                            ft_checkpoint_dir(bind->checkpoint));
    q->matrices[q->count++] = (struct quantised){.data_at = data_at,
                                                 .scale_at = scale_at,
                                                 .band_first = q->band_count,
                                                 .out = out,
                                                 .in = in,
                                                 .format = format};
    q->band_count += ft_div_up(out, FT_QUANTISE_BLOCK);
    *number = q->count;
    return FT_OK;
}

int ft_quantiser_begin(struct ft_bind *bind, struct ft_error *err)
{
    struct ft_quantiser *q = bind->quantiser;
    if (!q)
        return FT_OK;
    q->bands = calloc(q->band_count, sizeof *q->bands);
    if (q->bands)
        return FT_OK;
    return ft_error_set(err, FT_MEMORY, "%s: no memory for %llu bands of rows",
                        ft_checkpoint_dir(bind->checkpoint), (unsigned long long)q->band_count);
}

void ft_quantiser_free(struct ft_quantiser *q)
{
    if (!q)
        return;
    for (uint64_t i = 0; q->bands && i < q->band_count; i++)
        free(q->bands[i].rows); /* a load that failed midway */
    pthread_mutex_destroy(&q->lock);
    free(q->bands);
    free(q->matrices);
    free(q);
}

/* The buffer of a band of `bytes` bytes; NULL: no memory. */
static char *band_rows(struct ft_quantiser *q, struct band *band, uint64_t bytes)
{
    pthread_mutex_lock(&q->lock);
    if (!band->rows)
        band->rows = malloc(bytes);
    char *rows = band->rows;
    pthread_mutex_unlock(&q->lock);
    return rows;
}

/* Counts bytes that are in place; true: they were the band's last, its rows are the caller's now. */
static bool band_complete(struct ft_quantiser *q, struct band *band, uint64_t got, uint64_t bytes)
{
    pthread_mutex_lock(&q->lock);
    band->got += got;
    FT_ASSERT_LE(band->got, bytes);
    bool complete = band->got == bytes;
    if (complete)
        band->rows = NULL;
    pthread_mutex_unlock(&q->lock);
    return complete;
}

int ft_quantiser_apply(const struct ft_bind *bind, const struct ft_load_part *part, const char *source,
                       uint64_t from, uint64_t bytes, char *base, struct ft_error *err)
{
    struct ft_quantiser *q = bind->quantiser;
    const struct quantised *m = &q->matrices[part->quantised - 1];
    /* f16 gathers as f32 */
    uint64_t element = m->format == FT_FORMAT_F32 ? 4 : 2, grow = element / part->unit_bytes;
    uint64_t band_source = (uint64_t)FT_QUANTISE_BLOCK * m->in * part->unit_bytes;
    while (bytes) {
        uint64_t number = from / band_source, inside = from % band_source;
        uint64_t piece = FT_MIN(band_source - inside, bytes);
        uint32_t top = (uint32_t)number * FT_QUANTISE_BLOCK, rows = FT_MIN(FT_QUANTISE_BLOCK, m->out - top);
        uint64_t band_bytes = (uint64_t)rows * m->in * element;
        struct band *band = &q->bands[m->band_first + number];
        char *to = band_rows(q, band, band_bytes);
        if (!to)
            return ft_error_set(err, FT_MEMORY, "no memory for %llu bytes of rows to quantise",
                                (unsigned long long)band_bytes);
        ft_bind_convert((enum ft_load_convert)part->convert, source, piece, to + inside * grow);
        if (band_complete(q, band, piece * grow, band_bytes)) {
            uint64_t scales = number * ft_div_up(m->in, FT_QUANTISE_BLOCK) * sizeof(float);
            bool finite = ft_quantise_fp8(to, m->format, rows, m->in,
                                          (uint8_t *)base + m->data_at + (uint64_t)top * m->in,
                                          (float *)(void *)(base + m->scale_at + scales));
            FT_ASSERT_EQ(finite, true); /* every piece was checked before it came here */
            free(to);
        }
        source += piece;
        from += piece;
        bytes -= piece;
    }
    return FT_OK;
}
