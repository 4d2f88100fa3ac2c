/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/draw_internal.h"

#include <errno.h>
#include <string.h>

/* Colours that differ in lightness too, for eyes that do not tell red from green. Source: Okabe and Ito, 2008. */
static const char *const class_colours[FT_CLASS_COUNT] = {
    [FT_CLASS_ATTENTION] = "#56b4e9", [FT_CLASS_ROUTER] = "#000000", [FT_CLASS_EXPERT] = "#e69f00",
    [FT_CLASS_SHARED] = "#f0e442",    [FT_CLASS_FETCH] = "#0072b2",  [FT_CLASS_PLE] = "#cc79a7",
    [FT_CLASS_MIX] = "#009e73",       [FT_CLASS_HEAD] = "#d55e00",   [FT_CLASS_SCHEDULE] = "#999999"};
static const char *const wait_colours[FT_WAIT_COUNT] = {[FT_WAIT_CPU] = "#e69f00",
                                                        [FT_WAIT_DEVICE] = "#56b4e9",
                                                        [FT_WAIT_LINK] = "#0072b2",
                                                        [FT_WAIT_IO] = "#cc79a7",
                                                        [FT_WAIT_NONE] = "#bbbbbb"};

ft_draw_function *ft_draw_find(const char *format)
{
    static const struct {
        const char *name;
        ft_draw_function *draw;
    } formats[] = {
        {"text", ft_draw_text}, {"json", ft_draw_json}, {"dot", ft_draw_dot}, {"svg", ft_draw_svg}};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(formats[i].name, format) == 0)
            return formats[i].draw;
    return NULL;
}

int ft_draw_svg(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    return draw->step ? ft_draw_svg_step(draw, out, err) : ft_draw_svg_graph(draw, out, err);
}

bool ft_draw_wants(const struct ft_draw *draw, uint32_t layer)
{
    return !draw->layers_given || (layer >= draw->layer_first && layer <= draw->layer_last);
}

uint32_t ft_draw_thread_count(const struct ft_draw *draw)
{
    uint32_t count = draw->header ? draw->header->thread_count : 0;
    for (uint32_t i = 0; i < draw->step->record_count; i++)
        count = FT_MAX(count, draw->step->records[i].thread + 1u);
    return FT_MIN(count, (uint32_t)FT_TRACE_THREADS_MAX);
}

void ft_draw_thread_name(const struct ft_draw *draw, uint32_t thread, char *name, size_t cap)
{
    if (draw->header && thread < draw->header->thread_count && draw->header->thread_names[thread][0])
        snprintf(name, cap, "%s", draw->header->thread_names[thread]);
    else
        snprintf(name, cap, "thread %u", thread);
}

void ft_draw_step_title(const struct ft_draw *draw, char *title, size_t cap)
{
    const struct ft_trace_header *header = draw->header;
    const struct ft_trace_step *step = draw->step;
    char layers[40] = "";
    if (step->layer_begin || (header && step->layer_end && step->layer_end < header->layer_count))
        snprintf(layers, sizeof layers, ", layers %u to %u", step->layer_begin, step->layer_end - 1);
    int used =
        snprintf(title, cap, "%s, %s, device %s: step %u (%s, %u row%s%s), %.1f us",
                 header && header->model[0] ? header->model : "model", header ? header->strategy : "?",
                 header ? header->device : "?", step->step, step->prefill ? "prefill" : "decode", step->rows,
                 step->rows == 1 ? "" : "s", layers, (double)(step->end_ns - step->begin_ns) / 1e3);
    if (step->dropped && used > 0 && (size_t)used < cap)
        snprintf(title + used, cap - (size_t)used, "; %u records were dropped", step->dropped);
}

const char *ft_draw_class_colour(enum ft_class class)
{
    return class < FT_CLASS_COUNT ? class_colours[class] : "#999999";
}

const char *ft_draw_wait_colour(enum ft_wait wait)
{
    return wait < FT_WAIT_COUNT ? wait_colours[wait] : "#bbbbbb";
}

void ft_draw_put_xml(FILE *out, const char *text)
{
    for (const char *at = text; *at; at++) {
        switch (*at) {
        case '&':
            fputs("&amp;", out);
            break;
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        case '\'':
            fputs("&#39;", out);
            break;
        default:
            fputc(*at >= ' ' && *at <= '~' ? *at : '?', out);
        }
    }
}

void ft_draw_put_dot(FILE *out, const char *text)
{
    for (const char *at = text; *at; at++) {
        if (*at == '"' || *at == '\\')
            fputc('\\', out);
        fputc(*at >= ' ' && *at <= '~' ? *at : '?', out);
    }
}

int ft_draw_finish(FILE *out, struct ft_error *err)
{
    errno = 0;
    bool bad = fflush(out) != 0;
    if (bad || ferror(out))
        return ft_error_set(err, FT_IO, "the output could not be written: %s",
                            errno ? strerror(errno) : "an earlier write failed");
    return FT_OK;
}
