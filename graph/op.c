/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/op.h"

static const char *const op_names[FT_OP_COUNT] = {
#define FT_OP_NAME(name, text, axis, class) text,
    FT_OPS(FT_OP_NAME)
#undef FT_OP_NAME
};
static const char *const op_axes[FT_OP_COUNT] = {
#define FT_OP_AXIS(name, text, axis, class) axis,
    FT_OPS(FT_OP_AXIS)
#undef FT_OP_AXIS
};
static const uint8_t op_classes[FT_OP_COUNT] = {
#define FT_OP_CLASS(name, text, axis, class) FT_CLASS_##class,
    FT_OPS(FT_OP_CLASS)
#undef FT_OP_CLASS
};
static const char *const class_names[FT_CLASS_COUNT] = {"attention", "router", "experts", "shared", "fetch",
                                                        "ple",       "mix",    "head",    "schedule"};
static const char *const wait_names[FT_WAIT_COUNT] = {"cpu", "device", "link", "io", "none"};

const char *ft_op_name(enum ft_op op)
{
    return op < FT_OP_COUNT ? op_names[op] : "?";
}

const char *ft_op_axis(enum ft_op op)
{
    return op < FT_OP_COUNT ? op_axes[op] : "?";
}

enum ft_class ft_op_class(enum ft_op op)
{
    return op < FT_OP_COUNT ? (enum ft_class)op_classes[op] : FT_CLASS_SCHEDULE;
}

const char *ft_class_name(enum ft_class class)
{
    return class < FT_CLASS_COUNT ? class_names[class] : "?";
}

const char *ft_wait_name(enum ft_wait wait)
{
    return wait < FT_WAIT_COUNT ? wait_names[wait] : "?";
}
