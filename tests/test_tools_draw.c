/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/test.h"
#include "tools/draw.h"
#include "tools/draw_internal.h"

#include <jansson.h>

/* ---- a graph by hand: embed -> norm L0 x2 -> join -> router L0 -> combine L1 -> end, and a PLE read ---- */

enum { JOBS = 8, LAYERS = 2 };
static uint8_t op[JOBS] = {FT_OP_EMBED, FT_OP_PLE_READ, FT_OP_NORM,    FT_OP_NORM,
                           FT_OP_JOIN,  FT_OP_ROUTER,   FT_OP_COMBINE, FT_OP_END};
static uint8_t lane[JOBS] = {FT_LANE_CPU,    FT_LANE_IO,  FT_LANE_CPU, FT_LANE_CPU,
                             FT_LANE_INLINE, FT_LANE_CPU, FT_LANE_CPU, FT_LANE_INLINE};
static uint16_t layer[JOBS] = {UINT16_MAX, 0, 0, 0, 0, 0, 1, UINT16_MAX};
static uint32_t begin[JOBS], end[JOBS] = {1, 0, 1, 2, 0, 1, 8, 0};
static uint64_t bytes[JOBS] = {100, 50, 1000, 2000, 0, 4096, 7, 0}, flops[JOBS] = {1, 0, 2, 3, 0, 4, 5, 0};
static int32_t in_degree[JOBS] = {0, 0, 1, 1, 3, 1, 1, 1};
static uint32_t succ_begin[JOBS + 1] = {0, 2, 3, 4, 5, 6, 7, 8, 8};
static uint32_t succ[8] = {2, 3, 4, 4, 4, 5, 6, 7};
static uint32_t router_job[LAYERS] = {5, FT_NONE}, combine_job[LAYERS] = {6, FT_NONE};
static uint32_t reserved_begin[LAYERS] = {8, FT_NONE};
static const struct ft_graph graph = {.shape = {.rows = 1, .sequences = 1, .logit_rows = 1},
                                      .static_count = JOBS,
                                      .reserved_count = 9,
                                      .edge_count = 8,
                                      .layer_count = LAYERS,
                                      .op = op,
                                      .lane = lane,
                                      .layer = layer,
                                      .begin = begin,
                                      .end = end,
                                      .bytes = bytes,
                                      .flops = flops,
                                      .in_degree = in_degree,
                                      .succ_begin = succ_begin,
                                      .succ = succ,
                                      .router_job = router_job,
                                      .combine_job = combine_job,
                                      .reserved_begin = reserved_begin,
                                      .end_job = 7};
static const struct ft_draw graph_draw = {.title = "m<o>del & \"co\\\"", .graph = &graph};

/* ---- a recorded step by hand ---- */

static struct ft_trace_header header = {.model = "<script>&'\"\\\x01\xff",
                                        .strategy = "hybrid",
                                        .device = "host",
                                        .isa = "ref",
                                        .layer_count = 2,
                                        .expert_count = 8,
                                        .topk = 2,
                                        .workers = 2,
                                        .slot_count = 4,
                                        .thread_count = 3,
                                        .expert_bytes = 4096,
                                        .thread_names = {"worker 0", "wor<ker>", "link"}};
static const struct ft_trace_record records[] = {
    {.start_ns = 10000,
     .end_ns = 40000,
     .bytes = 2000,
     .job = 1,
     .expert = FT_NONE,
     .slot = FT_NONE,
     .layer = 0,
     .thread = 0,
     .rows = 1,
     .kind = FT_RECORD_JOB,
     .op = FT_OP_ROUTER,
     .lane = FT_LANE_CPU},
    {.start_ns = 40000,
     .end_ns = 70000,
     .job = 2,
     .expert = FT_NONE,
     .slot = FT_NONE,
     .layer = UINT16_MAX,
     .thread = 0,
     .kind = FT_RECORD_WAIT,
     .lane = FT_LANE_CPU,
     .detail = FT_WAIT_LINK},
    {.start_ns = 70000,
     .end_ns = 90000,
     .bytes = 4096,
     .job = 3,
     .expert = 5,
     .slot = FT_NONE,
     .layer = 1,
     .thread = 0,
     .rows = 1,
     .kind = FT_RECORD_JOB,
     .op = FT_OP_EXPERT_UP,
     .lane = FT_LANE_CPU,
     .predicted_ns = 5,
     .flags = 1},
    {.start_ns = 42000,
     .end_ns = 68000,
     .bytes = 4096,
     .job = 4,
     .expert = 6,
     .slot = 2,
     .layer = 0,
     .thread = 2,
     .rows = 1,
     .kind = FT_RECORD_JOB,
     .op = FT_OP_FETCH,
     .lane = FT_LANE_LINK},
    {.start_ns = 41000,
     .end_ns = 41000,
     .job = FT_NONE,
     .expert = 6,
     .slot = 2,
     .layer = 0,
     .thread = 0,
     .rows = 1,
     .kind = FT_RECORD_CHOICE,
     .op = FT_OP_ROUTER,
     .lane = FT_LANE_CPU,
     .detail = FT_REASON_SHARE,
     .place = FT_PLACE_FETCH,
     .predicted_ns = INFINITY},
    {.start_ns = 0,
     .end_ns = UINT64_MAX,
     .job = 9,
     .expert = FT_NONE,
     .slot = FT_NONE,
     .layer = 0,
     .thread = 65535,
     .kind = FT_RECORD_JOB,
     .op = FT_OP_NORM,
     .lane = FT_LANE_DEVICE},
};
static struct ft_trace_step step = {.step = 7,
                                    .rows = 1,
                                    .sequences = 1,
                                    .dropped = 3,
                                    .record_count = sizeof records / sizeof records[0],
                                    .begin_ns = 10000,
                                    .end_ns = 110000,
                                    .records = records};
static const struct ft_draw step_draw = {.header = &header, .step = &step};

static char *render(const char *format, const struct ft_draw *draw)
{
    struct ft_error err;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    ft_draw_function *function = ft_draw_find(format);
    CHECK(function != NULL);
    CHECK_OK(function(draw, out, &err), &err);
    fclose(out);
    return text;
}

static bool holds(const char *text, const char *part)
{
    if (!strstr(text, part))
        fprintf(stderr, "missing: %s\n", part);
    return strstr(text, part) != NULL;
}

/* Tags balance, attributes are quoted, no stray < or &: enough of XML for what is drawn. */
static bool is_well_formed(const char *xml)
{
    char stack[16][16];
    int depth = 0;
    for (const char *at = xml; *at; at++) {
        if (*at == '&' && strncmp(at, "&amp;", 5) && strncmp(at, "&lt;", 4) && strncmp(at, "&gt;", 4) &&
            strncmp(at, "&quot;", 6) && strncmp(at, "&#39;", 5))
            return false;
        if ((unsigned char)*at > '~' || (*at < ' ' && *at != '\n') || (*at == '>'))
            return false;
        if (*at != '<')
            continue;
        bool closing = at[1] == '/';
        const char *name = at + 1 + closing;
        size_t length = strcspn(name, " />");
        bool quoted = false;
        for (at = name; *at && (quoted || *at != '>'); at++) {
            if (*at == '"')
                quoted = !quoted;
            if (*at == '<')
                return false;
        }
        if (!*at || length == 0 || length > 15)
            return false;
        if (closing) {
            if (depth == 0 || strlen(stack[depth - 1]) != length || memcmp(stack[--depth], name, length) != 0)
                return false;
        } else if (at[-1] != '/') {
            if (depth == 16)
                return false;
            snprintf(stack[depth++], 16, "%.*s", (int)length, name);
        }
    }
    return depth == 0;
}

/* Braces and brackets balance outside strings, and every string ends. */
static bool is_balanced(const char *dot)
{
    int braces = 0, brackets = 0;
    bool quoted = false;
    for (const char *at = dot; *at; at++) {
        if (quoted && *at == '\\' && at[1])
            at++;
        else if (*at == '"')
            quoted = !quoted;
        else if (!quoted) {
            braces += (*at == '{') - (*at == '}');
            brackets += (*at == '[') - (*at == ']');
        }
        if (braces < 0 || brackets < 0)
            return false;
    }
    return braces == 0 && brackets == 0 && !quoted;
}

TEST(formats_are_found_by_name)
{
    CHECK(ft_draw_find("svg") == ft_draw_svg);
    CHECK(ft_draw_find("png") == NULL);
}

TEST(text_of_a_graph_lists_tiles_and_totals)
{
    char *text = render("text", &graph_draw);
    CHECK(holds(text, "8 jobs, 8 edges, 9 ids reserved per layer"));
    CHECK(holds(text, "layer 0\n"));
    CHECK(holds(text, "  norm             cpu          2          3.0"));
    CHECK(holds(text, "  ple_read         io           1"));
    CHECK(holds(text, "outside layers\n  embed"));
    CHECK(holds(text, "total by class"));
    free(text);
}

TEST(text_of_a_step_shows_times_waits_and_choices)
{
    char *text = render("text", &step_draw);
    CHECK(holds(text, "hybrid, device host: step 7 (decode, 1 row), 100.0 us; 3 records were dropped"));
    struct ft_trace_step slice = step;
    struct ft_draw draw_slice = {.header = &header, .step = &slice};
    char title[256];
    slice.prefill = 1;
    slice.rows = 9;
    slice.layer_end = header.layer_count;
    ft_draw_step_title(&draw_slice, title, sizeof title);
    CHECK(holds(title, "step 7 (prefill, 9 rows), 100.0 us"));
    slice.layer_begin = header.layer_count - 1;
    ft_draw_step_title(&draw_slice, title, sizeof title);
    CHECK(holds(title, "(prefill, 9 rows, layers 1 to 1)"));
    CHECK(holds(text, "layer 0  experts: 0 resident, 1 fetched, 0 on the CPU"));
    CHECK(holds(text, "  router           cpu          1          2.0         30.0      1"));
    CHECK(holds(text, "  fetch            link         1          4.1         26.0      1"));
    CHECK(holds(text, "waited for: link 30.0 us"));
    free(text);
}

TEST(json_parses_and_holds_everything)
{
    json_error_t where;
    char *text = render("json", &graph_draw);
    json_t *root = json_loads(text, 0, &where);
    REQUIRE(root != NULL);
    CHECK(strcmp(json_string_value(json_object_get(root, "title")), graph_draw.title) == 0);
    json_t *jobs = json_object_get(root, "jobs");
    CHECK_EQ(json_array_size(jobs), JOBS);
    CHECK_EQ(json_array_size(json_object_get(json_array_get(jobs, 0), "successors")), 2);
    CHECK(json_is_null(json_object_get(json_array_get(jobs, 0), "layer")));
    json_decref(root);
    free(text);
    text = render("json", &step_draw);
    root = json_loads(text, 0, &where);
    REQUIRE(root != NULL);
    CHECK(strcmp(json_string_value(json_object_get(root, "model")), "<script>&'\"\\\x01?") == 0);
    json_t *list = json_object_get(root, "records");
    CHECK_EQ(json_array_size(list), step.record_count);
    CHECK(strcmp(json_string_value(json_object_get(json_array_get(list, 1), "cause")), "link") == 0);
    CHECK(json_object_get(json_array_get(list, 4), "predicted_ns") == NULL); /* infinity is no JSON number */
    CHECK(strcmp(json_string_value(json_object_get(json_array_get(list, 4), "place")), "fetch") == 0);
    CHECK(json_is_true(json_object_get(json_array_get(list, 2), "stolen")));
    json_decref(root);
    free(text);
}

TEST(dot_is_balanced_and_has_nodes_and_edges)
{
    char *text = render("dot", &graph_draw);
    CHECK(is_balanced(text));
    CHECK(holds(text, "digraph step {"));
    CHECK(holds(text, "j5 [label=\"router L0\\n[0, 1) cpu\\n4.1 KB\""));
    CHECK(holds(text, "j4 -> j5;"));
    CHECK(holds(text, "j5 -> r0 [style=dashed];"));
    CHECK(holds(text, "m<o>del & \\\"co\\\\\\\""));
    free(text);
    text = render("dot", &step_draw);
    CHECK(is_balanced(text));
    CHECK(holds(text, "label=\"wor<ker>\""));
    CHECK(holds(text, "n2 [label=\"expert_up L1 e5\\n20.0 us\""));
    CHECK(holds(text, "n0 -> n2;"));
    free(text);
}

TEST(svg_of_a_step_is_well_formed_escaped_and_complete)
{
    char *text = render("svg", &step_draw);
    CHECK(is_well_formed(text));
    CHECK(strstr(text, "<script") == NULL);
    CHECK(holds(text, "&lt;script&gt;&amp;&#39;&quot;"));
    CHECK(holds(text, ">worker 0</text>"));
    CHECK(holds(text, ">link</text>"));
    CHECK(strstr(text, ">wor&lt;ker&gt;</text>") == NULL); /* a thread without records has no row */
    CHECK(holds(text, "expert_up, layer 1, expert 5, 20.0 us, 4.1 KB"));
    CHECK(holds(text, "waiting for link, 30.0 us"));
    CHECK(holds(text, ">20 us</text>"));
    CHECK(holds(text, ">L0</text>"));
    CHECK(holds(text, ">fetch</text>")); /* legend */
    free(text);
}

TEST(svg_of_a_graph_is_well_formed_and_groups_tiles)
{
    char *text = render("svg", &graph_draw);
    CHECK(is_well_formed(text));
    CHECK(holds(text, "norm L0</text>"));
    CHECK(holds(text, "2 tiles, 3.0 KB"));
    CHECK(holds(text, ">io</text>"));
    CHECK(holds(text, "up to 9 jobs"));
    free(text);
}

TEST(layers_filter_every_format)
{
    static const char *const formats[] = {"text", "json", "dot", "svg"};
    struct ft_draw graph_one = graph_draw, step_one = step_draw, none = step_draw;
    graph_one.layers_given = step_one.layers_given = none.layers_given = true;
    graph_one.layer_first = step_one.layer_first = graph_one.layer_last = step_one.layer_last = 1;
    none.layer_first = none.layer_last = 200;
    for (int i = 0; i < 4; i++) {
        char *text = render(formats[i], &graph_one);
        CHECK(strstr(text, "combine") != NULL && strstr(text, "router") == NULL);
        free(text);
        text = render(formats[i], &step_one);
        CHECK(strstr(text, "expert_up") != NULL || i == 3);
        CHECK(strstr(text, "router") == NULL);
        free(text);
        text = render(formats[i], &none); /* nothing to show is not a failure */
        CHECK(i != 3 || is_well_formed(text));
        CHECK(i != 2 || is_balanced(text));
        free(text);
    }
}

TEST(empty_and_absurd_steps_are_drawn_too)
{
    static const char *const formats[] = {"text", "json", "dot", "svg"};
    struct ft_trace_step empty = {.step = 1, .begin_ns = 5, .end_ns = 5};
    struct ft_trace_step wide = {.step = 2, .record_count = 1, .end_ns = UINT64_MAX, .records = &records[5]};
    struct ft_draw draws[] = {{.step = &empty}, {.step = &wide}, {.header = &header, .step = &wide}};
    struct ft_graph nothing = {.succ_begin = succ_begin};
    struct ft_draw bare = {.graph = &nothing};
    for (int i = 0; i < 4; i++) {
        for (int d = 0; d < 3; d++) {
            char *text = render(formats[i], &draws[d]);
            CHECK(i != 3 || is_well_formed(text));
            free(text);
        }
        char *text = render(formats[i], &bare);
        CHECK(text[0] != '\0');
        free(text);
    }
}

TEST(a_full_device_is_an_error)
{
    static const char *const formats[] = {"text", "json", "dot", "svg"};
    struct ft_error err;
    for (int i = 0; i < 4; i++) {
        FILE *out = fopen("/dev/full", "w");
        REQUIRE(out != NULL);
        CHECK_FAILS(ft_draw_find(formats[i])(&step_draw, out, &err), FT_IO, "No space left", &err);
        fclose(out);
    }
}

TEST_MAIN(RUN(formats_are_found_by_name) RUN(text_of_a_graph_lists_tiles_and_totals)
              RUN(text_of_a_step_shows_times_waits_and_choices) RUN(json_parses_and_holds_everything)
                  RUN(dot_is_balanced_and_has_nodes_and_edges)
                      RUN(svg_of_a_step_is_well_formed_escaped_and_complete)
                          RUN(svg_of_a_graph_is_well_formed_and_groups_tiles) RUN(layers_filter_every_format)
                              RUN(empty_and_absurd_steps_are_drawn_too) RUN(a_full_device_is_an_error))
