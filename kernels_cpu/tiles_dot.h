/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of matmul_body.h by the dot products of dot_body.h alone. */
#ifndef FT_TILES_DOT_H
#define FT_TILES_DOT_H

#define TILE_ROWS ROWS /* most activation rows of a tile */

/* Two panels: up to twice as many rows are packed once for all tiles of a call. */
struct tile_panel {
    struct panel dot[2];
};

static void tile_panel_init(struct tile_panel *panel)
{
    panel->dot[0].rows = panel->dot[1].rows = 0;
}

/* Activation rows of the next tile when `left` are. */
static uint32_t tile_rows(const struct ft_matrix *w, uint32_t left)
{
    return panel_rows(w, left);
}

/* Are so many rows two batches, so that both panels stay filled? Only asked where pair_sums is, with 512 bits. */
static bool tile_is_of_two(const struct ft_matrix *w, uint32_t x_count)
{
    uint32_t rest = x_count - ROWS;
    return PAIRED && x_count > ROWS && panel_rows(w, ROWS) == ROWS && (rest <= 4 || rest == ROWS);
}

/* Output rows per tile: their weights stay in the second cache while batches of activation rows pass by. A single row
 * takes what the buffers hold: whenever it goes on elsewhere, it waits for the first AHEAD bytes. */
static uint32_t tile_step(const struct ft_matrix *w, uint32_t x_count)
{
    uint32_t step = is_packed(kind_of(w)) ? TILE : TILE / 2;
    if (x_count == 1)
        return TILE_ROWS * TILE;
    if (tile_is_of_two(w, x_count)) /* the next tiles of two matrices are there, too */
        return is_packed(kind_of(w)) ? step / 2 : step / 4;
    return step;
}

/* out[r * TILE + i] = W[o + i] . x[first + r] for i < count <= tile_step, r < rows <= TILE_ROWS; o of [begin, end). */
static void tile_dots(const struct ft_matrix *w, uint32_t o, uint32_t count, struct tile_span span,
                      const struct ft_rows *x, uint32_t first, uint32_t rows, struct tile_panel *panel,
                      float *out)
{
    struct follow follow = {.two = tile_is_of_two(w, x->count),
                            .cold = o == span.begin,
                            .next = o + 2 * count <= span.end ? count : 0};
    panel_dots(w, o, count, x, first, rows, &follow, &panel->dot[first / ROWS % 2], out);
}

#endif
