/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/cgroup.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 4096
/* v1 says "no limit" with the largest page-aligned number; nobody has 2^60 bytes. */
#define MEMORY_NONE_BYTES (1ull << 60)

enum controller { CPU_V1, MEMORY_V1, UNIFIED, CONTROLLER_COUNT };

/* One hierarchy as this process sees it. */
struct hierarchy {
    char mount[PATH_BYTES]; /* mount point, without the root prefix; "" = not mounted */
    char base[PATH_BYTES];  /* which group of the hierarchy is mounted there ("/" outside of containers) */
    char group[PATH_BYTES]; /* our group, from /proc/self/cgroup; "" = not a member */
};

/* Root prefix and path joined; false when too long. "/" and NULL mean no prefix. */
static bool join(char out[PATH_BYTES], const char *root, const char *path, const char *file)
{
    if (!root || strcmp(root, "/") == 0)
        root = "";
    int bytes = snprintf(out, PATH_BYTES, "%s%s%s", root, path, file);
    return bytes >= 0 && bytes < PATH_BYTES;
}

static bool has_word(const char *list, const char *word)
{
    size_t bytes = strlen(word);
    for (const char *at = list; *at;) {
        size_t span = strcspn(at, ",");
        if (span == bytes && memcmp(at, word, bytes) == 0)
            return true;
        at += span + (at[span] == ',');
    }
    return false;
}

static void copy(char out[PATH_BYTES], const char *text)
{
    if (strlen(text) < PATH_BYTES)
        strcpy(out, text);
}

/* mountinfo writes space, tab, newline and backslash as \ooo. */
static void unescape(char *text)
{
    char *out = text;
    for (const char *in = text; *in; out++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && in[2] >= '0' && in[2] <= '7' && in[3] >= '0' &&
            in[3] <= '7') {
            *out = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 4;
        } else {
            *out = *in++;
        }
    }
    *out = '\0';
}

static void set_mount(struct hierarchy *hierarchy, const char *base, const char *mount)
{
    if (hierarchy->mount[0]) /* the first mount is the usual one; later ones are bind mounts */
        return;
    copy(hierarchy->base, base);
    copy(hierarchy->mount, mount);
}

/* 31 23 0:28 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct */
static void parse_mount(char *line, struct hierarchy hierarchies[CONTROLLER_COUNT])
{
    char *tail = strstr(line, " - ");
    char *save = NULL, *fields[5], *type, *options;
    if (!tail)
        return;
    *tail = '\0';
    tail += 3;
    for (int i = 0; i < 5; i++)
        if (!(fields[i] = strtok_r(i ? NULL : line, " ", &save)))
            return;
    save = NULL;
    type = strtok_r(tail, " \n", &save);
    if (!type || !strtok_r(NULL, " \n", &save))
        return;
    options = strtok_r(NULL, " \n", &save);
    unescape(fields[3]);
    unescape(fields[4]);
    if (strcmp(type, "cgroup2") == 0)
        set_mount(&hierarchies[UNIFIED], fields[3], fields[4]);
    if (strcmp(type, "cgroup") == 0 && options && has_word(options, "cpu"))
        set_mount(&hierarchies[CPU_V1], fields[3], fields[4]);
    if (strcmp(type, "cgroup") == 0 && options && has_word(options, "memory"))
        set_mount(&hierarchies[MEMORY_V1], fields[3], fields[4]);
}

/* 4:cpu,cpuacct:/docker/1234     v2: 0::/user.slice */
static void parse_group(char *line, struct hierarchy hierarchies[CONTROLLER_COUNT])
{
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path || path[1] != '/')
        return;
    *path++ = '\0';
    controllers++;
    path[strcspn(path, "\n")] = '\0';
    if (controllers[0] == '\0' && line[0] == '0' && line[1] == ':')
        copy(hierarchies[UNIFIED].group, path);
    if (has_word(controllers, "cpu"))
        copy(hierarchies[CPU_V1].group, path);
    if (has_word(controllers, "memory"))
        copy(hierarchies[MEMORY_V1].group, path);
}

static void for_each_line(const char *root, const char *path,
                          void (*parse)(char *line, struct hierarchy hierarchies[CONTROLLER_COUNT]),
                          struct hierarchy hierarchies[CONTROLLER_COUNT])
{
    char name[PATH_BYTES];
    char *line = NULL;
    size_t capacity = 0;
    FILE *file = join(name, root, path, "") ? fopen(name, "re") : NULL;
    if (!file)
        return;
    while (getline(&line, &capacity, file) > 0)
        parse(line, hierarchies);
    free(line);
    fclose(file);
}

static bool exists(const char *root, const char *mount, const char *file)
{
    char name[PATH_BYTES];
    FILE *opened = join(name, root, mount, file) ? fopen(name, "re") : NULL;
    if (opened)
        fclose(opened);
    return opened != NULL;
}

/* Without mountinfo: the places where distributions and container engines mount. */
static void guess_mounts(const char *root, struct hierarchy hierarchies[CONTROLLER_COUNT])
{
    static const struct {
        enum controller controller;
        const char *mount;
        const char *file;
    } places[] = {
        {CPU_V1, "/sys/fs/cgroup/cpu", "/cpu.cfs_quota_us"},
        {CPU_V1, "/sys/fs/cgroup/cpu,cpuacct", "/cpu.cfs_quota_us"},
        {CPU_V1, "/sys/fs/cgroup/cpuacct,cpu", "/cpu.cfs_quota_us"},
        {MEMORY_V1, "/sys/fs/cgroup/memory", "/memory.limit_in_bytes"},
        {UNIFIED, "/sys/fs/cgroup", "/cgroup.controllers"},
        {UNIFIED, "/sys/fs/cgroup", "/cpu.max"},
        {UNIFIED, "/sys/fs/cgroup/unified", "/cgroup.controllers"},
    };
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        if (exists(root, places[i].mount, places[i].file))
            set_mount(&hierarchies[places[i].controller], "/", places[i].mount);
}

/* Reads a small file whole; false when missing, empty or too long to be what we look for. */
static bool read_small(const char *root, const char *directory, const char *name, char *text, size_t bytes)
{
    char path[PATH_BYTES];
    FILE *file = join(path, root, directory, name) ? fopen(path, "re") : NULL;
    if (!file)
        return false;
    size_t got = fread(text, 1, bytes, file);
    fclose(file);
    if (got == 0 || got == bytes)
        return false;
    text[got] = '\0';
    return true;
}

/* A decimal number and nothing else before `end`; false for anything the kernel would not write. */
static bool parse_u64(const char **at, uint64_t *value)
{
    char *end;
    if (**at < '0' || **at > '9')
        return false;
    errno = 0;
    *value = strtoull(*at, &end, 10);
    if (errno || (*end != '\0' && *end != '\n' && *end != ' '))
        return false;
    *at = end + (*end == ' ');
    return true;
}

static bool read_u64(const char *root, const char *directory, const char *name, uint64_t *value)
{
    char text[64];
    const char *at = text;
    return read_small(root, directory, name, text, sizeof text) && parse_u64(&at, value);
}

static void take_quota(struct ft_cgroup_limits *limits, uint64_t quota_us, uint64_t period_us)
{
    if (quota_us == 0 || period_us == 0)
        return;
    double cores = (double)quota_us / (double)period_us;
    if (limits->quota_cores == 0 || cores < limits->quota_cores)
        limits->quota_cores = cores;
}

static void take_memory(struct ft_cgroup_limits *limits, uint64_t bytes)
{
    if (bytes > 0 && bytes < MEMORY_NONE_BYTES && (limits->memory_bytes == 0 || bytes < limits->memory_bytes))
        limits->memory_bytes = bytes;
}

static void take_throttle(const char *root, const char *directory, struct ft_cgroup_limits *limits)
{
    char text[4096];
    if (!read_small(root, directory, "/cpu.stat", text, sizeof text))
        return;
    const char *periods_text = strstr(text, "nr_periods ");
    const char *throttled_text = strstr(text, "nr_throttled ");
    uint64_t periods, throttled;
    if (!periods_text || !throttled_text)
        return;
    periods_text += strlen("nr_periods ");
    throttled_text += strlen("nr_throttled ");
    if (!parse_u64(&periods_text, &periods) || !parse_u64(&throttled_text, &throttled))
        return;
    if (throttled > limits->nr_throttled || limits->nr_periods == 0) {
        limits->nr_periods = periods;
        limits->nr_throttled = throttled;
    }
}

static void read_level(const char *root, const char *directory, enum controller controller,
                       struct ft_cgroup_limits *limits)
{
    uint64_t quota_us, period_us, bytes;
    char text[64];
    const char *at = text;
    switch (controller) {
    case CPU_V1:
        if (read_u64(root, directory, "/cpu.cfs_quota_us", &quota_us) &&
            read_u64(root, directory, "/cpu.cfs_period_us", &period_us))
            take_quota(limits, quota_us, period_us);
        take_throttle(root, directory, limits);
        break;
    case MEMORY_V1:
        if (read_u64(root, directory, "/memory.limit_in_bytes", &bytes))
            take_memory(limits, bytes);
        break;
    default:
        if (read_small(root, directory, "/cpu.max", text, sizeof text) && parse_u64(&at, &quota_us) &&
            parse_u64(&at, &period_us))
            take_quota(limits, quota_us, period_us);
        if (read_u64(root, directory, "/memory.max", &bytes))
            take_memory(limits, bytes);
        take_throttle(root, directory, limits);
        break;
    }
}

/* Our group as a path below the mount point: "" when the mount point is our group, or when ours is not below it. */
static const char *group_below_mount(const struct hierarchy *hierarchy)
{
    const char *group = hierarchy->group;
    size_t base_bytes = strcmp(hierarchy->base, "/") == 0 ? 0 : strlen(hierarchy->base);
    if (strstr(group, "/..")) /* a group outside of our namespace: not visible from here */
        return "";
    if (strncmp(group, hierarchy->base, base_bytes) != 0 || (group[base_bytes] && group[base_bytes] != '/'))
        return "";
    return group + base_bytes;
}

static void walk_up(const char *root, const struct hierarchy *hierarchy, enum controller controller,
                    struct ft_cgroup_limits *limits)
{
    char directory[PATH_BYTES];
    size_t mount_bytes = strlen(hierarchy->mount);
    if (mount_bytes == 0 || !join(directory, NULL, hierarchy->mount, group_below_mount(hierarchy)))
        return;
    for (;;) {
        read_level(root, directory, controller, limits);
        char *slash = strrchr(directory + mount_bytes, '/');
        if (!slash)
            return;
        *slash = '\0';
    }
}

void ft_cgroup_read(const char *root, struct ft_cgroup_limits *limits)
{
    memset(limits, 0, sizeof *limits);
    struct hierarchy *hierarchies = calloc(CONTROLLER_COUNT, sizeof *hierarchies);
    if (!hierarchies)
        return;
    for_each_line(root, "/proc/self/mountinfo", parse_mount, hierarchies);
    for_each_line(root, "/proc/self/cgroup", parse_group, hierarchies);
    guess_mounts(root, hierarchies);
    for (int i = 0; i < CONTROLLER_COUNT; i++)
        walk_up(root, &hierarchies[i], (enum controller)i, limits);
    free(hierarchies);
}
