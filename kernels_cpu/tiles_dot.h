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

/* out[r][i] = W[o + i] . x[first + r] for i < count <= TILE, r < rows <= TILE_ROWS. */
static void tile_dots(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct ft_rows *x,
                      uint32_t first, uint32_t rows, struct tile_panel *panel, float (*out)[TILE])
{
    panel_dots(w, o, count, x, first, rows, &panel->dot[first / ROWS % 2], out);
}

#endif
