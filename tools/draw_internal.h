/* SPDX-License-Identifier: Apache-2.0 */
/* What the draw_*.c files share. */
#ifndef FT_TOOLS_DRAW_INTERNAL_H
#define FT_TOOLS_DRAW_INTERNAL_H

#include "tools/draw.h"

#define FT_DRAW_OUTSIDE FT_LAYERS_MAX /* index of "no layer" in arrays over layers */
#define FT_DRAW_LAYERS (FT_LAYERS_MAX + 1u)

/* Is something of this layer (UINT16_MAX: of none) to be shown? */
bool ft_draw_wants(const struct ft_draw *draw, uint32_t layer);
static inline uint32_t ft_draw_layer_index(uint32_t layer)
{
    return layer < FT_LAYERS_MAX ? layer : FT_DRAW_OUTSIDE;
}

/* Rows of threads: names of the header, and a number for a thread that has none. */
uint32_t ft_draw_thread_count(const struct ft_draw *draw);
void ft_draw_thread_name(const struct ft_draw *draw, uint32_t thread, char *name, size_t cap);
/* One line: model, strategy, device, step, duration. */
void ft_draw_step_title(const struct ft_draw *draw, char *title, size_t cap);
const char *ft_draw_class_colour(enum ft_class class);
const char *ft_draw_wait_colour(enum ft_wait wait);

/* Text inside XML (& < > " '); what XML cannot hold, and bytes that are not ASCII, become '?'. */
void ft_draw_put_xml(FILE *out, const char *text);
/* Text inside a dot string: the same care for " and \. */
void ft_draw_put_dot(FILE *out, const char *text);
/* Flushes; FT_IO with the system's words when anything was refused. */
int ft_draw_finish(FILE *out, struct ft_error *err);

int ft_draw_svg_step(const struct ft_draw *draw, FILE *out, struct ft_error *err);
int ft_draw_svg_graph(const struct ft_draw *draw, FILE *out, struct ft_error *err);

#endif
