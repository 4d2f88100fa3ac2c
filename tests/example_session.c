/* SPDX-License-Identifier: Apache-2.0 */
/* The engine as a library: the greedy continuation of token ids.   example_session DIR 2001 262 2235 */
#include <stdio.h>
#include <stdlib.h>
#include "io/load.h"
#include "jobs/session.h"
#include "jobs/topology.h"
#include "planner/plan_make.h"
#include "planner/policies.h"
#define TRY(call) if ((call) != FT_OK) return fprintf(stderr, "%s\n", err.message), 1

int main(int argc, char **argv)
{
    struct ft_error err;
    struct ft_checkpoint *checkpoint;
    struct ft_topology topology;
    struct ft_loaded loaded;
    struct ft_plan plan;
    struct ft_row_tables *tables = NULL;
    struct ft_session *session;
    uint32_t prompt[64], count = 0, sequence, events_count;
    if (argc < 3) return fprintf(stderr, "usage: example_session DIR ID.. (a checkpoint, and up to 64 token ids)\n"), 2;
    while (count + 2 < (uint32_t)argc && count < 64) { prompt[count] = (uint32_t)atoi(argv[count + 2]); count++; }
    TRY(ft_checkpoint_open(&checkpoint, argv[1], &err));
    const struct ft_model *model = ft_checkpoint_model(checkpoint);
    TRY(ft_topology_open(&topology, NULL, &err));
    TRY(ft_load(checkpoint, NULL, &loaded, NULL, &err));
    struct ft_machine machine = {.cores_usable = topology.core_count, .ram_bytes = 8ull << 30};
    struct ft_plan_options wishes = {.strategy = FT_STRATEGY_CPU, .slot_rate = -1, .fetch_share = -1, .sequences_max = 1};
    TRY(ft_plan_make(model, &loaded.sizes, &machine, &wishes, &plan, &err));
    if (model->ple_count) TRY(ft_row_tables_open(&tables, checkpoint, &err));
    struct ft_session_options options = {.model = model, .weights = &loaded.weights, .ple = tables, .plan = &plan,
                                         .policy = &ft_policy_safe, .topology = &topology, .pin = true};
    TRY(ft_session_open(&session, &options, &err));
    struct ft_request request = {.prompt = prompt, .prompt_count = count, .max_tokens = 16};
    TRY(ft_session_submit(session, &request, &sequence, &err));
    while (!ft_session_is_idle(session)) {
        struct ft_event events[2];
        TRY(ft_session_step(session, events, 2, &events_count, &err));
        for (uint32_t i = 0; i < events_count; i++)
            if (events[i].kind == FT_EVENT_TOKEN) printf("%u ", events[i].token);
    }
    ft_session_close(session);
    ft_row_tables_close(tables);
    ft_loaded_fini(&loaded);
    ft_topology_close(&topology);
    ft_checkpoint_close(checkpoint);
    return puts(""), 0;
}
