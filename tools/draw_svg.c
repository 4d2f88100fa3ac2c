/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of a recorded step: time to the right, one row per thread. */
#include "tools/draw_internal.h"

#include <stdlib.h>
#include <string.h>

#define WIDTH 1200.0
#define LEFT 118.0
#define RIGHT 24.0
#define TOP 62.0 /* title and axis */
#define ROW 28.0
#define BOX 20.0
#define TICKS_WANTED 10
#define LABEL_GAP 28.0 /* between two layer numbers */

struct scene {
    const struct ft_draw *draw;
    FILE *out;
    uint32_t *order; /* [count] records to show, by thread, then start */
    uint32_t count, thread_count, row_count;
    uint32_t row_of_thread[FT_TRACE_THREADS_MAX]; /* FT_NONE: nothing to show */
    uint64_t begin_ns, end_ns;
    bool class_seen[FT_CLASS_COUNT], wait_seen[FT_WAIT_COUNT];
};

/* Neighbouring jobs of one class and layer that are too thin to be told apart become one box. */
struct box {
    double x0, x1;
    uint64_t busy_ns, bytes;
    uint32_t count, layer;
    enum ft_op op;
    uint32_t record;
};

static const struct ft_trace_record *record_of(const struct scene *scene, uint32_t i)
{
    return &scene->draw->step->records[scene->order[i]];
}

static int compare(const void *left, const void *right, void *context)
{
    const struct ft_trace_record *records = context;
    uint32_t i = *(const uint32_t *)left, j = *(const uint32_t *)right;
    const struct ft_trace_record *a = &records[i], *b = &records[j];
    if (a->thread != b->thread)
        return a->thread < b->thread ? -1 : 1;
    if (a->start_ns != b->start_ns)
        return a->start_ns < b->start_ns ? -1 : 1;
    return i < j ? -1 : i > j;
}

static int scene_init(struct scene *scene, const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    const struct ft_trace_step *step = draw->step;
    uint64_t first = UINT64_MAX, last = 0;
    *scene = (struct scene){.draw = draw, .out = out, .thread_count = ft_draw_thread_count(draw)};
    memset(scene->row_of_thread, 0xff, sizeof scene->row_of_thread);
    scene->order = malloc((step->record_count + (size_t)1) * sizeof *scene->order);
    if (!scene->order)
        return ft_error_set(err, FT_MEMORY, "no memory to sort %u records", step->record_count);
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *record = &step->records[i];
        if (record->kind != FT_RECORD_JOB || !ft_draw_wants(draw, record->layer))
            continue;
        first = FT_MIN(first, record->start_ns);
        last = FT_MAX(last, record->end_ns);
    }
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *record = &step->records[i];
        /* a wait belongs to no layer: it is shown where it overlaps the chosen ones */
        bool wanted = record->kind == FT_RECORD_JOB
                          ? ft_draw_wants(draw, record->layer)
                          : record->kind == FT_RECORD_WAIT &&
                                (!draw->layers_given || (record->end_ns > first && record->start_ns < last));
        if (!wanted || record->thread >= scene->thread_count)
            continue;
        scene->order[scene->count++] = i;
        scene->row_of_thread[record->thread] = 0;
    }
    if (scene->count)
        qsort_r(scene->order, scene->count, sizeof *scene->order, compare, (void *)(uintptr_t)step->records);
    for (uint32_t thread = 0; thread < scene->thread_count; thread++)
        if (scene->row_of_thread[thread] != FT_NONE)
            scene->row_of_thread[thread] = scene->row_count++;
    bool whole = !draw->layers_given || first > last;
    scene->begin_ns = whole ? step->begin_ns : first;
    scene->end_ns = FT_MAX(whole ? step->end_ns : last, scene->begin_ns + 1);
    return FT_OK;
}

static double x_of(const struct scene *scene, uint64_t ns)
{
    uint64_t inside = FT_MIN(FT_MAX(ns, scene->begin_ns), scene->end_ns) - scene->begin_ns;
    return LEFT + (double)inside / (double)(scene->end_ns - scene->begin_ns) * (WIDTH - LEFT - RIGHT);
}

static double y_of(uint32_t row)
{
    return TOP + row * ROW + (ROW - BOX) / 2;
}

static double bottom_of(const struct scene *scene)
{
    return TOP + FT_MAX(scene->row_count, 1u) * ROW;
}

static void put_head(const struct scene *scene)
{
    char title[256];
    double height = bottom_of(scene) + 84;
    ft_draw_step_title(scene->draw, title, sizeof title);
    fprintf(
        scene->out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
        "font-family=\"sans-serif\" font-size=\"11\">\n<title>",
        WIDTH, height, WIDTH, height);
    ft_draw_put_xml(scene->out, title);
    fputs("</title>\n<defs>\n", scene->out);
    for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
        fprintf(scene->out,
                "<pattern id=\"w%u\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
                "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#f2f2f2\"/><rect "
                "width=\"2\" "
                "height=\"6\" fill=\"%s\" fill-opacity=\"0.55\"/></pattern>\n",
                wait, ft_draw_wait_colour((enum ft_wait)wait));
    fprintf(scene->out, "</defs>\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"#ffffff\"/>\n", WIDTH, height);
    fputs("<text x=\"12\" y=\"22\" font-size=\"14\" font-weight=\"bold\">", scene->out);
    ft_draw_put_xml(scene->out, title);
    fputs("</text>\n", scene->out);
}

static void put_rows(const struct scene *scene)
{
    char name[32];
    for (uint32_t thread = 0; thread < scene->thread_count; thread++) {
        uint32_t row = scene->row_of_thread[thread];
        if (row == FT_NONE)
            continue;
        fprintf(scene->out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#fafafa\"/>\n",
                LEFT, y_of(row), WIDTH - LEFT - RIGHT, BOX);
        ft_draw_thread_name(scene->draw, thread, name, sizeof name);
        fprintf(scene->out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", LEFT - 8, y_of(row) + 14);
        ft_draw_put_xml(scene->out, name);
        fputs("</text>\n", scene->out);
    }
}

/* 1, 2 or 5 times a power of ten, so that about TICKS_WANTED ticks are drawn. */
static uint64_t tick_ns(uint64_t span)
{
    uint64_t step = 1;
    for (;;) {
        static const uint64_t factors[] = {1, 2, 5};
        for (int i = 0; i < 3; i++)
            if (span / TICKS_WANTED < step * factors[i])
                return step * factors[i];
        if (step > UINT64_MAX / 100)
            return UINT64_MAX;
        step *= 10;
    }
}

static void put_axis(const struct scene *scene)
{
    uint64_t span = scene->end_ns - scene->begin_ns, step = tick_ns(span);
    uint64_t offset = scene->begin_ns - FT_MIN(scene->begin_ns, scene->draw->step->begin_ns);
    fputs("<g fill=\"#555555\" stroke=\"none\">\n", scene->out);
    for (uint64_t at = 0; at <= span; at += step) {
        double x = x_of(scene, scene->begin_ns + at);
        fprintf(scene->out,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"0.5\" height=\"%.1f\" fill=\"#cccccc\"/>"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.*f us</text>\n",
                x, TOP - 6, bottom_of(scene) - TOP + 6, x, TOP - 12, step < 1000 ? 3 : 0,
                (double)(offset + at) / 1e3);
        if (span - at < step)
            break;
    }
    fputs("</g>\n", scene->out);
}

static void put_box(const struct scene *scene, const struct box *box, uint32_t row)
{
    const struct ft_trace_record *record = &scene->draw->step->records[box->record];
    double width = FT_MAX(box->x1 - box->x0, 0.3);
    enum ft_class class = ft_op_class(box->op);
    fprintf(scene->out, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\"%s><title>",
            box->x0, y_of(row), width, BOX, ft_draw_class_colour(class),
            width > 3 ? " stroke=\"#ffffff\" stroke-width=\"0.5\"" : "");
    if (box->count > 1)
        fprintf(scene->out, "%u jobs of class %s", box->count, ft_class_name(class));
    else
        fprintf(scene->out, "%s", ft_op_name(box->op));
    if (box->layer < FT_LAYERS_MAX)
        fprintf(scene->out, ", layer %u", box->layer);
    if (box->count == 1 && record->expert != FT_NONE)
        fprintf(scene->out, ", expert %u", record->expert);
    fprintf(scene->out, ", %.1f us, %.1f KB</title></rect>\n", (double)box->busy_ns / 1e3,
            (double)box->bytes / 1e3);
}

static void put_waits(struct scene *scene)
{
    for (uint32_t i = 0; i < scene->count; i++) {
        const struct ft_trace_record *record = record_of(scene, i);
        double x0 = x_of(scene, record->start_ns), x1 = x_of(scene, record->end_ns);
        if (record->kind != FT_RECORD_WAIT || x1 - x0 < 0.2)
            continue;
        scene->wait_seen[record->detail] = true;
        fprintf(scene->out,
                "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" "
                "fill=\"url(#w%u)\"><title>waiting for %s, "
                "%.1f us</title></rect>\n",
                x0, y_of(scene->row_of_thread[record->thread]) + 3, x1 - x0, BOX - 6, record->detail,
                record->detail == FT_WAIT_NONE ? "nothing" : ft_wait_name((enum ft_wait)record->detail),
                (double)(record->end_ns - record->start_ns) / 1e3);
    }
}

static void put_jobs(struct scene *scene)
{
    struct box box = {0};
    uint32_t row = FT_NONE;
    for (uint32_t i = 0; i < scene->count; i++) {
        const struct ft_trace_record *record = record_of(scene, i);
        enum ft_op op = (enum ft_op)record->op;
        double x0 = x_of(scene, record->start_ns), x1 = x_of(scene, record->end_ns);
        uint32_t next = scene->row_of_thread[record->thread];
        if (record->kind != FT_RECORD_JOB)
            continue;
        scene->class_seen[ft_op_class(op)] = true;
        bool joins = box.count && next == row && ft_op_class(op) == ft_op_class(box.op) &&
                     record->layer == box.layer && x0 - box.x1 < 0.4 &&
                     (x1 - x0 < 1.5 || box.x1 - box.x0 < 1.5);
        if (!joins) {
            if (box.count)
                put_box(scene, &box, row);
            box = (struct box){.x0 = x0, .layer = record->layer, .op = op, .record = scene->order[i]};
            row = next;
        }
        box.x1 = joins ? FT_MAX(box.x1, x1) : x1;
        box.busy_ns += record->end_ns - record->start_ns;
        box.bytes += record->bytes;
        box.count++;
    }
    if (box.count)
        put_box(scene, &box, row);
}

static void put_layers(const struct scene *scene)
{
    uint64_t first[FT_LAYERS_MAX];
    double last_line = 0, last_label = 0;
    memset(first, 0xff, sizeof first);
    for (uint32_t i = 0; i < scene->count; i++) {
        const struct ft_trace_record *record = record_of(scene, i);
        /* rows of PLE tables are read long before their layer begins */
        if (record->kind == FT_RECORD_JOB && record->layer < FT_LAYERS_MAX && record->op != FT_OP_PLE_READ)
            first[record->layer] = FT_MIN(first[record->layer], record->start_ns);
    }
    for (uint32_t layer = 0; layer < FT_LAYERS_MAX; layer++) {
        double x = first[layer] == UINT64_MAX ? 0 : x_of(scene, first[layer]);
        if (x == 0 || x - last_line < 4)
            continue;
        last_line = x;
        fprintf(scene->out, "<rect x=\"%.2f\" y=\"%.1f\" width=\"0.7\" height=\"%.1f\" fill=\"#888888\"/>\n",
                x, TOP, bottom_of(scene) - TOP + 4);
        if (x - last_label < LABEL_GAP)
            continue;
        last_label = x;
        fprintf(scene->out, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"10\" fill=\"#555555\">L%u</text>\n", x,
                bottom_of(scene) + 15, layer);
    }
}

static void put_legend(const struct scene *scene)
{
    double x = 12, y = bottom_of(scene) + 32;
    for (uint32_t class = 0; class < FT_CLASS_COUNT; class ++) {
        if (!scene->class_seen[class])
            continue;
        fprintf(scene->out,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"12\" fill=\"%s\"/><text x=\"%.1f\" "
                "y=\"%.1f\">%s"
                "</text>\n",
                x, y, ft_draw_class_colour((enum ft_class) class), x + 19, y + 10,
                ft_class_name((enum ft_class) class));
        x += 100;
    }
    x = 12;
    y += 24;
    for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++) {
        if (!scene->wait_seen[wait])
            continue;
        fprintf(scene->out,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"12\" fill=\"url(#w%u)\"/><text x=\"%.1f\" "
                "y=\"%.1f\">waiting for %s</text>\n",
                x, y, wait, x + 19, y + 10,
                wait == FT_WAIT_NONE ? "nothing" : ft_wait_name((enum ft_wait)wait));
        x += 150;
    }
}

int ft_draw_svg_step(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    struct scene scene;
    int status = scene_init(&scene, draw, out, err);
    if (status != FT_OK)
        return status;
    put_head(&scene);
    put_rows(&scene);
    put_axis(&scene);
    put_waits(&scene);
    put_jobs(&scene);
    put_layers(&scene);
    put_legend(&scene);
    fputs("</svg>\n", out);
    free(scene.order);
    return ft_draw_finish(out, err);
}
