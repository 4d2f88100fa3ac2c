/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fallback behind io/uring.h where io_uring is refused: a few threads that call pread.
 *
 * Threads: submit and wait belong to one thread; the pool's own threads are hidden. One lock and two
 * conditions, held for list work only. Errors: FT_MEMORY, FT_SYSTEM (threads), FT_TIMEOUT.
 */
#ifndef FT_IO_PREAD_POOL_H
#define FT_IO_PREAD_POOL_H

#include "io/read_progress.h"

#define FT_PREAD_THREADS 4u /* default */
#define FT_PREAD_THREADS_MAX 64u

struct ft_pread_pool;
/* `depth` reads at most are queued, running or finished and not yet reaped. */
int ft_pread_pool_open(struct ft_pread_pool **out, uint32_t depth, uint32_t thread_count,
                       struct ft_error *err);
/* Waits for reads that are running; those still queued are dropped. */
void ft_pread_pool_close(struct ft_pread_pool *pool);
/* The caller keeps to depth. */
void ft_pread_pool_submit(struct ft_pread_pool *pool, const struct ft_read_progress *reads, uint32_t count);
/* As ft_reader_wait; `wanted` is at most what is in flight. */
int ft_pread_pool_wait(struct ft_pread_pool *pool, struct ft_read_done *done, uint32_t cap, uint32_t wanted,
                       uint64_t timeout_ns, uint32_t *count, struct ft_error *err);

#endif
