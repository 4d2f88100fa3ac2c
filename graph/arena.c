/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/arena.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE_BYTES (2u << 20)

void ft_arena_count(struct ft_arena *arena, const char *name)
{
    *arena = (struct ft_arena){.base = NULL, .bytes = UINT64_MAX, .used = 0, .name = name};
}

int ft_arena_init(struct ft_arena *arena, const char *name, uint64_t bytes, struct ft_error *err)
{
    *arena = (struct ft_arena){.name = name};
    if (bytes > (uint64_t)PTRDIFF_MAX - 4096)
        return ft_error_set(err, FT_MEMORY, "%s arena: %llu bytes is not a possible size", name,
                            (unsigned long long)bytes);
    bytes = ft_round_up(FT_MAX(bytes, 1u), 4096);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return ft_error_set(err, FT_MEMORY, "%s arena: cannot map %llu MiB: %s", name,
                            (unsigned long long)(bytes >> 20), strerror(errno));
    if (bytes >= 4 * HUGE_PAGE_BYTES)
        (void)madvise(base, bytes, MADV_HUGEPAGE); /* a hint: refused where THP is off, and then nothing is lost */
    arena->base = base;
    arena->bytes = bytes;
    return FT_OK;
}

void ft_arena_fini(struct ft_arena *arena)
{
    if (arena->base)
        munmap(arena->base, arena->bytes);
    *arena = (struct ft_arena){.name = arena->name};
}

int ft_arena_push(struct ft_arena *arena, uint64_t count, uint64_t size, void **out, struct ft_error *err)
{
    uint64_t bytes, end;
    *out = NULL;
    if (!ft_mul_u64(count, size, &bytes) || !ft_add_u64(bytes, FT_ARENA_ALIGN - 1, &end))
        return ft_error_set(err, FT_MEMORY, "%s arena: %llu x %llu bytes overflows", arena->name,
                            (unsigned long long)count, (unsigned long long)size);
    bytes = ft_round_up(bytes, FT_ARENA_ALIGN);
    if (!ft_add_u64(arena->used, bytes, &end) || end > arena->bytes)
        return ft_error_set(err, FT_MEMORY, "%s arena: %llu bytes asked, %llu of %llu left", arena->name,
                            (unsigned long long)bytes, (unsigned long long)(arena->bytes - arena->used),
                            (unsigned long long)arena->bytes);
    if (arena->base && bytes)
        *out = arena->base + arena->used;
    arena->used = end;
    return FT_OK;
}

void ft_arena_reset(struct ft_arena *arena)
{
    if (arena->base)
        memset(arena->base, 0, arena->used);
    arena->used = 0;
}
