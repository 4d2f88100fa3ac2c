/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/cgroup.h"
#include "jobs/topology.h"
#include "tests/io_refusal.h"
#include "tests/test.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

/* The trees are written by hand after the kernel's documentation and the layouts of common container engines;
 * none is a recording of a real machine. */
#define CGROUP_DIR FT_DATA_DIR "/cgroup/"

static struct ft_cgroup_limits read_case(const char *name)
{
    char root[1024];
    struct ft_cgroup_limits limits;
    snprintf(root, sizeof root, CGROUP_DIR "%s", name);
    ft_cgroup_read(root, &limits);
    return limits;
}

static uint32_t usable_of(const char *name, const char *synthetic)
{
    char root[1024];
    struct ft_error err;
    struct ft_topology topology;
    snprintf(root, sizeof root, CGROUP_DIR "%s", name);
    struct ft_topology_options options = {.root = root, .synthetic = synthetic};
    if (ft_topology_open(&topology, &options, &err) != FT_OK)
        return 0;
    ft_topology_close(&topology);
    return topology.core_count;
}

TEST(smallest_limit_of_the_path_wins)
{
    static const struct {
        const char *name;
        double quota_cores;
        uint64_t memory_bytes, periods, throttled;
        uint32_t usable; /* of 16 cores */
    } cases[] = {
        {"v2_parent", 2, 8ull << 30, 4567, 3115, 2},
        {"v2_max", 0, 0, 0, 0, 16},
        {"v2_fraction", 7.65, 32ull << 30, 0, 0, 7},
        {"v2_half", 0.5, 0, 0, 0, 1},
        {"v2_outside_namespace", 3, 0, 0, 0, 3},
        {"v1_container", 7.65, 16ull << 30, 120, 17, 7},
        {"v1_unlimited", 0, 0, 0, 0, 16},
        {"v1_parent_smaller", 3, 4ull << 30, 0, 0, 3},
        {"v1_no_proc", 2.5, 1ull << 30, 0, 0, 2},
        {"hybrid_vm", 1, 2ull << 30, 120, 17, 1},
        {"hybrid_both", 3, 3ull << 30, 0, 0, 3},
        {"garbage", 0, 0, 0, 0, 16},
        {"no_such_directory", 0, 0, 0, 0, 16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int before = test_failures_;
        struct ft_cgroup_limits limits = read_case(cases[i].name);
        CHECK_NEAR(limits.quota_cores, cases[i].quota_cores, 1e-9);
        CHECK_EQ(limits.memory_bytes, cases[i].memory_bytes);
        CHECK_EQ(limits.nr_periods, cases[i].periods);
        CHECK_EQ(limits.nr_throttled, cases[i].throttled);
        CHECK_EQ(usable_of(cases[i].name, "pack:2 l3:2 core:4 pu:2"), cases[i].usable);
        if (test_failures_ != before)
            fprintf(stderr, "  in case %s\n", cases[i].name);
    }
}

TEST(throttle_counters_are_read)
{
    struct ft_topology_throttle throttle;
    ft_topology_read_throttle(CGROUP_DIR "v2_parent", &throttle);
    CHECK_EQ(throttle.nr_periods, 4567);
    CHECK_EQ(throttle.nr_throttled, 3115);
    ft_topology_read_throttle(NULL, &throttle); /* whatever this machine has */
}

/* Random bytes of the kernel's alphabet must never crash, hang or give nonsense. */
TEST(random_files_do_no_harm)
{
    static const char alphabet[] = "0123456789 \n/:,.-\\cgroup2pumax\t\001\377";
    static const char *const names[] = {"proc/self/mountinfo", "proc/self/cgroup", "sys/fs/cgroup/cpu.max",
                                        "sys/fs/cgroup/memory.max", "sys/fs/cgroup/cpu.stat"};
    static const char *const folders[] = {"proc", "proc/self", "sys", "sys/fs", "sys/fs/cgroup"};
    char root[] = "/tmp/ft_cgroup_XXXXXX", path[256];
    uint32_t state = 1;
    REQUIRE(mkdtemp(root) != NULL);
    for (size_t i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/%s", root, folders[i]);
        CHECK_EQ(mkdir(path, 0700), 0);
    }
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < 5; i++) {
            snprintf(path, sizeof path, "%s/%s", root, names[i]);
            FILE *file = fopen(path, "w");
            REQUIRE(file != NULL);
            for (uint32_t bytes = state % 300; bytes; bytes--) {
                state = state * 1664525u + 1013904223u;
                fputc(alphabet[(state >> 16) % (sizeof alphabet - 1)], file);
            }
            state = state * 1664525u + 1013904223u;
            fclose(file);
        }
        struct ft_cgroup_limits limits;
        ft_cgroup_read(root, &limits);
        CHECK(limits.quota_cores >= 0 && limits.memory_bytes < 1ull << 60);
    }
    for (size_t i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/%s", root, names[i]);
        unlink(path);
    }
    for (size_t i = 5; i-- > 0;) {
        snprintf(path, sizeof path, "%s/%s", root, folders[i]);
        rmdir(path);
    }
    rmdir(root);
}

TEST(one_hardware_thread_of_each_core_is_used)
{
    struct ft_error err;
    struct ft_topology topology;
    struct ft_topology_options options = {.root = CGROUP_DIR "v2_max",
                                          .synthetic = "numa:2 l3:2 core:4 pu:2"};
    CHECK_OK(ft_topology_open(&topology, &options, &err), &err);
    CHECK_EQ(topology.visible_cpu_count, 32);
    CHECK_EQ(topology.visible_core_count, 16);
    CHECK_EQ(topology.allowed_core_count, 16);
    CHECK_EQ(topology.core_count, 16);
    CHECK_EQ(topology.l3_domain_count, 4);
    CHECK_EQ(topology.cores[0].os_cpu, 0);
    CHECK_EQ(topology.cores[1].os_cpu, 2);
    CHECK_EQ(topology.cores[5].l3_domain, 1);
    CHECK_EQ(topology.cores[5].numa_node, 0);
    CHECK_EQ(topology.cores[15].l3_domain, 3);
    CHECK_EQ(topology.cores[15].numa_node, 1);
    CHECK(strcmp(topology.usable_reason, "16 cores visible, affinity 16, quota none -> 16 usable") == 0);
    CHECK(!ft_topology_bind(&topology, 0)); /* not this machine */
    ft_topology_close(&topology);
}

TEST(siblings_in_the_mask_count_as_one_core)
{
    struct ft_error err;
    struct ft_topology topology;
    /* CPUs 0,1 and 2,3 are pairs; of 5 only the second sibling's pair (4,5) is allowed through 5; 16-17 is
     * one core. */
    struct ft_topology_options options = {
        .root = CGROUP_DIR "v2_max", .synthetic = "numa:2 l3:2 core:4 pu:2", .affinity = "0-3,5,16-17"};
    CHECK_OK(ft_topology_open(&topology, &options, &err), &err);
    CHECK_EQ(topology.core_count, 4);
    CHECK_EQ(topology.cores[2].os_cpu, 5);
    CHECK_EQ(topology.cores[3].os_cpu, 16);
    CHECK_EQ(topology.cores[3].l3_domain, 1); /* dense: the second domain that is left */
    CHECK_EQ(topology.cores[3].numa_node, 1);
    CHECK_EQ(topology.l3_domain_count, 2);
    ft_topology_close(&topology);
}

TEST(quota_and_mask_are_both_obeyed_and_explained)
{
    struct ft_error err;
    struct ft_topology topology;
    struct ft_topology_options options = {.root = CGROUP_DIR "hybrid_vm", .synthetic = "core:2 pu:1"};
    CHECK_OK(ft_topology_open(&topology, &options, &err), &err);
    CHECK(strcmp(topology.usable_reason, "2 cores visible, affinity 2, quota 1.00 -> 1 usable") == 0);
    CHECK(!topology.may_pin);
    CHECK_EQ(topology.memory_limit_bytes, 2ull << 30);
    ft_topology_close(&topology);
    options = (struct ft_topology_options){
        .root = CGROUP_DIR "v2_fraction", .synthetic = "core:16 pu:1", .affinity = "4-6"};
    CHECK_OK(ft_topology_open(&topology, &options, &err), &err);
    CHECK_EQ(topology.core_count, 3);
    CHECK_EQ(topology.cores[0].os_cpu, 4);
    ft_topology_close(&topology);
}

TEST(bad_descriptions_are_refused)
{
    struct ft_error err;
    struct ft_topology topology;
    struct ft_topology_options options = {.synthetic = "seven cores please"};
    CHECK_FAILS(ft_topology_open(&topology, &options, &err), FT_USAGE, "synthetic", &err);
    options = (struct ft_topology_options){.synthetic = "core:2 pu:1", .affinity = "5-7"};
    CHECK_FAILS(ft_topology_open(&topology, &options, &err), FT_USAGE, "leaves no CPU", &err);
}

TEST(worker_count_leaves_room_for_the_driver)
{
    struct ft_error err;
    struct ft_topology topology = {.core_count = 0, .usable_reason = "test"};
    static const uint32_t want[][3] = {/* usable, without device, with */
                                       {1, 1, 1},
                                       {2, 2, 2},
                                       {3, 3, 2},
                                       {8, 8, 7},
                                       {16, 16, 15}};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        uint32_t workers = 0;
        topology.core_count = want[i][0];
        CHECK_OK(ft_topology_workers(&topology, false, 0, &workers, &err), &err);
        CHECK_EQ(workers, want[i][1]);
        CHECK_OK(ft_topology_workers(&topology, true, 0, &workers, &err), &err);
        CHECK_EQ(workers, want[i][2]);
        CHECK_OK(ft_topology_workers(&topology, true, want[i][0], &workers, &err), &err);
        CHECK_EQ(workers, want[i][0]);
        CHECK_FAILS(ft_topology_workers(&topology, true, want[i][0] + 1, &workers, &err), FT_USAGE,
                    "cores are usable", &err);
    }
    topology.core_count = 7;
    CHECK_EQ(ft_topology_service_core(&topology, 6, 0), FT_NONE);
    topology.core_count = 8;
    CHECK_EQ(ft_topology_service_core(&topology, 7, 0), 7);
    CHECK_EQ(ft_topology_service_core(&topology, 7, 1), FT_NONE);
    CHECK_EQ(ft_topology_service_core(&topology, 8, 0), FT_NONE);
}

TEST(this_machine_can_be_opened_and_bound_to)
{
    struct ft_error err;
    struct ft_topology topology;
    cpu_set_t before, after;
    CHECK_OK(ft_topology_open(&topology, NULL, &err), &err);
    REQUIRE(topology.core_count >= 1 && topology.l3_domain_count >= 1);
    CHECK(topology.core_count <= topology.allowed_core_count);
    CHECK(topology.allowed_core_count <= topology.visible_core_count);
    CHECK(topology.visible_core_count <= topology.visible_cpu_count);
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    for (uint32_t i = 0; i < topology.core_count; i++)
        CHECK(CPU_ISSET(topology.cores[i].os_cpu, &before));
    if (ft_topology_bind(&topology, 0)) {
        CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
        CHECK_EQ(CPU_COUNT(&after), 1);
        CHECK(CPU_ISSET(topology.cores[0].os_cpu, &after));
        CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
    }
    CHECK(!ft_topology_bind(&topology, topology.core_count));
    ft_topology_close(&topology);
}

static int child_opens_this_machine(void)
{
    struct ft_topology topology;
    struct ft_error err;
    alarm(20); /* hwloc would ask for ever */
    CHECK_FAILS(ft_topology_open(&topology, NULL, &err), FT_SYSTEM, "sched_getaffinity", &err);
    return test_failures_ != 0;
}

TEST(forbidden_affinity_call_is_an_error_not_a_hang)
{
    int code = run_in_child(refuse_affinity, EPERM, child_opens_this_machine);
    CHECK(code == 0 || code == 77);
}

TEST_MAIN(RUN(smallest_limit_of_the_path_wins) RUN(throttle_counters_are_read) RUN(random_files_do_no_harm)
              RUN(one_hardware_thread_of_each_core_is_used) RUN(siblings_in_the_mask_count_as_one_core)
                  RUN(quota_and_mask_are_both_obeyed_and_explained) RUN(bad_descriptions_are_refused)
                      RUN(worker_count_leaves_room_for_the_driver)
                          RUN(this_machine_can_be_opened_and_bound_to)
                              RUN(forbidden_affinity_call_is_an_error_not_a_hang))
