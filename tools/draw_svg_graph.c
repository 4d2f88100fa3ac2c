/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A compiled graph as a picture: dependency depth to the right, one row per lane, tiles of one op in one box.
 * The line breaks after COLUMNS depths, so that a layer or two fit the width of a page.
 */
#include "tools/draw_internal.h"

#include <stdlib.h>

#define WIDTH 1200.0
#define LEFT 84.0
#define COLUMNS 10u
#define COLUMN 110.0
#define BOX_WIDTH 104.0
#define BOX_HEIGHT 32.0
#define STACK 36.0
#define BAND_GAP 22.0
#define TOP 44.0
#define LAYERS_SHOWN 2u /* when the user does not say */

struct group {
    uint32_t depth, layer, count;
    uint8_t lane, op;
    uint64_t bytes;
};

struct picture {
    const struct ft_draw *draw;
    FILE *out;
    struct group *groups;
    uint32_t group_count;
    uint32_t *depth; /* [static_count] longest path from a first job */
};

static bool is_shown(const struct ft_draw *draw, uint32_t layer)
{
    return draw->layers_given ? ft_draw_wants(draw, layer) : layer < LAYERS_SHOWN;
}

/* Longest paths in topological order. false: out of memory. */
static bool find_depths(struct picture *picture)
{
    const struct ft_graph *graph = picture->draw->graph;
    int32_t *left = malloc((graph->static_count + (size_t)1) * sizeof *left);
    uint32_t *queue = malloc((graph->static_count + (size_t)1) * sizeof *queue), head = 0, tail = 0;
    for (uint32_t i = 0; left && queue && i < graph->static_count; i++)
        left[i] = 0;
    for (uint32_t e = 0; left && queue && e < graph->edge_count; e++)
        left[graph->succ[e]]++;
    for (uint32_t i = 0; left && queue && i < graph->static_count; i++)
        if (!left[i])
            queue[tail++] = i;
    for (; left && queue && head < tail; head++)
        for (uint32_t s = graph->succ_begin[queue[head]]; s < graph->succ_begin[queue[head] + 1]; s++) {
            uint32_t to = graph->succ[s];
            picture->depth[to] = FT_MAX(picture->depth[to], picture->depth[queue[head]] + 1);
            if (--left[to] == 0)
                queue[tail++] = to;
        }
    bool good = left && queue;
    free(left);
    free(queue);
    return good;
}

static int compare(const void *left, const void *right)
{
    const struct group *a = left, *b = right;
    if (a->depth != b->depth)
        return a->depth < b->depth ? -1 : 1;
    if (a->lane != b->lane)
        return a->lane - b->lane;
    if (a->op != b->op)
        return a->op - b->op;
    return a->layer < b->layer ? -1 : a->layer > b->layer;
}

static void add(struct picture *picture, struct group group)
{
    picture->groups[picture->group_count++] = group;
}

/* Tiles of an op at the same depth become one group, and depths without any box disappear. */
static void find_groups(struct picture *picture)
{
    const struct ft_graph *graph = picture->draw->graph;
    for (uint32_t i = 0; i < graph->static_count; i++)
        if (is_shown(picture->draw, graph->layer[i]) && graph->lane[i] != FT_LANE_INLINE)
            add(picture, (struct group){picture->depth[i], graph->layer[i], 1, graph->lane[i], graph->op[i],
                                        graph->bytes[i]});
    for (uint32_t layer = 0; layer < graph->layer_count; layer++)
        if (is_shown(picture->draw, layer) && graph->router_job[layer] != FT_NONE)
            add(picture, (struct group){picture->depth[graph->router_job[layer]] + 1, layer, 1,
                                        FT_LANE_INLINE, FT_OP_RESERVED, 0});
    if (picture->group_count)
        qsort(picture->groups, picture->group_count, sizeof *picture->groups, compare);
    uint32_t kept = 0, column = 0, depth = 0;
    for (uint32_t i = 0; i < picture->group_count; i++) {
        struct group group = picture->groups[i];
        column += i && group.depth != depth;
        depth = group.depth;
        group.depth = column;
        struct group *last = kept ? &picture->groups[kept - 1] : NULL;
        if (last && compare(last, &group) == 0) {
            last->count++;
            last->bytes += group.bytes;
        } else
            picture->groups[kept++] = group;
    }
    picture->group_count = kept;
}

static void put_group(const struct picture *picture, const struct group *group, double x, double y)
{
    FILE *out = picture->out;
    enum ft_op op = (enum ft_op)group->op;
    enum ft_class class = ft_op_class(op);
    bool reserved = op == FT_OP_RESERVED, dark = class == FT_CLASS_ROUTER || class == FT_CLASS_FETCH;
    fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" rx=\"3\" fill=\"%s\"%s/>", x, y,
            BOX_WIDTH, BOX_HEIGHT, reserved ? "#ffffff" : ft_draw_class_colour(class),
            reserved ? " stroke=\"#e69f00\" stroke-dasharray=\"4 3\"" : "");
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\"%s>", x + 5, y + 13, dark ? " fill=\"#ffffff\"" : "");
    fprintf(out, "%s", reserved ? "experts" : ft_op_name(op));
    if (group->layer < FT_LAYERS_MAX)
        fprintf(out, " L%u", group->layer);
    fprintf(out, "</text><text x=\"%.1f\" y=\"%.1f\" font-size=\"9\"%s>", x + 5, y + 26,
            dark ? " fill=\"#ffffff\"" : "");
    if (reserved)
        fprintf(out, "up to %u jobs</text>\n", picture->draw->graph->reserved_count);
    else
        fprintf(out, "%u tile%s, %.1f KB</text>\n", group->count, group->count == 1 ? "" : "s",
                (double)group->bytes / 1e3);
}

/* Draws (or only measures) the columns from `first` on; returns the height. */
static double put_band(const struct picture *picture, uint32_t first, double top, bool drawing)
{
    double y = top;
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++) {
        uint32_t stack[COLUMNS] = {0}, tallest = 0;
        for (uint32_t i = 0; i < picture->group_count; i++) {
            const struct group *group = &picture->groups[i];
            if (group->lane != lane || group->depth < first || group->depth >= first + COLUMNS)
                continue;
            uint32_t column = group->depth - first;
            if (drawing)
                put_group(picture, group, LEFT + column * COLUMN, y + stack[column] * STACK);
            stack[column]++;
            tallest = FT_MAX(tallest, stack[column]);
        }
        if (tallest && drawing)
            fprintf(picture->out, "<text x=\"10\" y=\"%.1f\" font-weight=\"bold\">%s</text>\n", y + 19,
                    lane == FT_LANE_INLINE ? "any lane" : ft_lane_name((enum ft_lane)lane));
        y += tallest * STACK;
    }
    return y - top;
}

static void put_picture(const struct picture *picture)
{
    FILE *out = picture->out;
    const char *title = picture->draw->title ? picture->draw->title : "graph";
    uint32_t columns = picture->group_count ? picture->groups[picture->group_count - 1].depth + 1 : 0;
    double height = TOP;
    for (uint32_t first = 0; first < columns; first += COLUMNS)
        height += put_band(picture, first, 0, false) + BAND_GAP;
    fprintf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
        "font-family=\"sans-serif\" font-size=\"11\">\n<title>",
        WIDTH, height, WIDTH, height);
    ft_draw_put_xml(out, title);
    fprintf(out,
            "</title>\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"#ffffff\"/>\n"
            "<text x=\"10\" y=\"24\" font-size=\"14\" font-weight=\"bold\">",
            WIDTH, height);
    ft_draw_put_xml(out, title);
    fputs("</text>\n", out);
    double y = TOP;
    for (uint32_t first = 0; first < columns; first += COLUMNS) {
        y += put_band(picture, first, y, true);
        if (first + COLUMNS < columns)
            fprintf(out, "<rect x=\"10\" y=\"%.1f\" width=\"%.1f\" height=\"0.7\" fill=\"#bbbbbb\"/>\n",
                    y + BAND_GAP / 2, WIDTH - 20);
        y += BAND_GAP;
    }
    fputs("</svg>\n", out);
}

int ft_draw_svg_graph(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    const struct ft_graph *graph = draw->graph;
    struct picture picture = {.draw = draw, .out = out};
    picture.depth = calloc(graph->static_count + (size_t)1, sizeof *picture.depth);
    picture.groups = calloc(graph->static_count + (size_t)graph->layer_count + 1, sizeof *picture.groups);
    int status = FT_OK;
    if (!picture.depth || !picture.groups || !find_depths(&picture))
        status = ft_error_set(err, FT_MEMORY, "no memory to lay out %u jobs", graph->static_count);
    else {
        find_groups(&picture);
        put_picture(&picture);
        status = ft_draw_finish(out, err);
    }
    free(picture.depth);
    free(picture.groups);
    return status;
}
