/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan maker: from model, weight sizes, machine and the user's options to a plan, before any weight is
 * loaded.
 *
 * What is chosen when the user does not say (every number also stands, with its reason, in the memory table):
 *   device      none for `cpu` and for `auto` on a machine without a GPU; the GPU when there is one; else the host
 *               device (slots and link in RAM) for the strategies that need a device
 *   auto        cpu without a device; fused when every expert fits; else its policy chooses, layer by layer
 *   workers     usable cores - 1 if a device is present and usable > 2 (- 2 with a GPU and usable >= 8), at least 1
 *   slots       fused: every expert. GPU: what the device's memory holds when everything else is in. Host device: a
 *               quarter of all experts, at least topk x sequences. cpu: none. Tiny builds: 1
 *   staging     per half min(experts of a layer, chunk rows x topk, 64 MiB of experts, or a whole layer when it is at
 *               most 1/32 of the GPU's memory), at least 1; fused: 1, for an expert that is missing at start; none
 *               without a device, nor on the host device without slots
 *   kv tokens   min(positions, 8192), rounded up to pages, plus one page per further sequence (each may end in a
 *               page of its own)
 *   sequences   8
 *   chunk       128 rows (a GPU: 2048), but no more than kv tokens, and a workspace of at most 48 MiB or 1/64 of the
 *               GPU's memory (not below 8 rows)
 *   snapshots   8 sequence states, at most the larger of 64 MiB and two states (rollback and prefix reuse need one
 *               each); none for models whose state can be cut anywhere
 *   several GPUs  layers in proportion to what head, activations and workspace leave of each GPU's memory; KV
 *               pages, state and dense weights of a layer on its GPU; slots by layers with experts, as far as each has
 *               room (planner/plan_gpus.c). Every pool is counted for each GPU, and each must fit
 * Where these do not fit, slots (down to topk), snapshots, kv tokens, sequences and at last slots again are
 * halved until they do, as far as that helps; what the user asked for is never changed.
 *
 * The memory of the host device is RAM: its terms stand under the device tier and count against both limits.
 * Threads: pure. Errors: FT_USAGE for wishes that contradict each other or the machine. A plan that does not
 * fit is FT_OK with fits = false and advice naming the option to lower, and to what.
 */
#ifndef FT_PLANNER_PLAN_MAKE_H
#define FT_PLANNER_PLAN_MAKE_H

#include "graph/plan.h"

int ft_plan_make(const struct ft_model *model, const struct ft_weight_sizes *sizes,
                 const struct ft_machine *machine, const struct ft_plan_options *options,
                 struct ft_plan *plan, struct ft_error *err);

/*
 * The plan with which the model runs on the smallest GPU: strategy offload, topk slots a sequence (the least
 * that needs no waves and keeps the captured step), chunks of 8 rows and one sequence unless the options say
 * more, the KV pool of the options (ft plan gives that of the plan it shows). plan->limit_bytes[FT_TIER_DEVICE] is what the GPU must have free,
 * whatever the machine has.
 */
int ft_plan_smallest_gpu(const struct ft_model *model, const struct ft_weight_sizes *sizes,
                         const struct ft_machine *machine, const struct ft_plan_options *options,
                         struct ft_plan *plan, struct ft_error *err);

#endif
