/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operations of a step. One line an op: what it computes, the axis that its tiles split, the class under
 * which its time is reported.
 *
 * A job is one tile of one op in one layer: it computes the range [begin, end) of the op's axis for all rows
 * of the step. Tiles of one op never write the same element.
 */
#ifndef FT_GRAPH_OP_H
#define FT_GRAPH_OP_H

#include "graph/types.h"

enum ft_class {
    FT_CLASS_ATTENTION,
    FT_CLASS_ROUTER,
    FT_CLASS_EXPERT,
    FT_CLASS_SHARED,
    FT_CLASS_FETCH,
    FT_CLASS_PLE,
    FT_CLASS_MIX,  /* norms and hyper-connections */
    FT_CLASS_HEAD, /* embedding, head, sampling */
    FT_CLASS_SCHEDULE,
    FT_CLASS_COUNT
};

/*    name            text               axis of tiles                class      */
#define FT_OPS(X)                                                                                            \
    X(EMBED, "embed", "row", HEAD)                                                                           \
    X(PLE_READ, "ple_read", "none", PLE)                                                                     \
    X(PLE_PROJECT, "ple_project", "output of [key | value]", PLE)                                            \
    X(PLE_INJECT, "ple_inject", "sequence", PLE)                                                             \
    X(NORM, "norm", "row", MIX)                                                                              \
    X(MIX_DOWN, "mix_down", "output of [down | inject]", MIX)                                                \
    X(MIX_UP, "mix_up", "hidden", MIX)                                                                       \
    X(LINEAR_PROJECT, "linear_project", "output of [qkv|z|b|a]", ATTENTION)                                  \
    X(LINEAR_CONV, "linear_conv", "sequence x 16 channels", ATTENTION)                                       \
    X(LINEAR_DELTA, "linear_delta", "sequence x value head", ATTENTION)                                      \
    X(ATTN_PROJECT, "attn_project", "output of [q|k|v|index]", ATTENTION)                                    \
    X(ATTN_PREPARE, "attn_prepare", "sequence", ATTENTION)                                                   \
    X(ATTN_SELECT, "attn_select", "row", ATTENTION)                                                          \
    X(ATTN, "attn", "row x kv head", ATTENTION)                                                              \
    X(ATTN_OUT, "attn_out", "hidden", ATTENTION)                                                             \
    X(ROUTER, "router", "none", ROUTER)                                                                      \
    X(SHARED_UP, "shared_up", "shared width", SHARED)                                                        \
    X(SHARED_DOWN, "shared_down", "hidden", SHARED)                                                          \
    X(EXPERT_UP, "expert_up", "expert width", EXPERT)                                                        \
    X(EXPERT_DOWN, "expert_down", "hidden", EXPERT)                                                          \
    X(EXPERT_DEVICE, "expert_device", "group of experts", EXPERT)                                            \
    X(FETCH, "fetch", "none", FETCH)                                                                         \
    X(COMBINE, "combine", "hidden", EXPERT)                                                                  \
    X(DENSE_UP, "dense_up", "dense width", SHARED)                                                           \
    X(DENSE_DOWN, "dense_down", "hidden", SHARED)                                                            \
    X(HEAD, "head", "vocabulary", HEAD)                                                                      \
    X(SAMPLE, "sample", "sequence", HEAD)                                                                    \
    X(POLICY, "policy", "none", SCHEDULE)                                                                    \
    X(JOIN, "join", "none", SCHEDULE)                                                                        \
    X(END, "end", "none", SCHEDULE)                                                                          \
    X(ROUTER_LOGITS, "router_logits", "expert", ROUTER)                                                      \
    X(RESERVED, "reserved", "filled after the router", SCHEDULE)

enum ft_op {
#define FT_OP_ENUM(name, text, axis, class) FT_OP_##name,
    FT_OPS(FT_OP_ENUM)
#undef FT_OP_ENUM
        FT_OP_COUNT
};

const char *ft_op_name(enum ft_op op);
const char *ft_op_axis(enum ft_op op);
enum ft_class ft_op_class(enum ft_op op);
const char *ft_class_name(enum ft_class which);

/* Why a lane waited. */
enum ft_wait {
    FT_WAIT_CPU,    /* for jobs of CPU lanes */
    FT_WAIT_DEVICE, /* for jobs of the device */
    FT_WAIT_LINK,   /* for a fetch */
    FT_WAIT_IO,     /* for a disk read */
    FT_WAIT_NONE,   /* nothing was in flight: between steps */
    FT_WAIT_COUNT
};
const char *ft_wait_name(enum ft_wait wait);

#endif
