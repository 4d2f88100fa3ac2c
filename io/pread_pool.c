/* SPDX-License-Identifier: Apache-2.0 */
#include "io/pread_pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct ft_pread_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    bool stop;
    uint32_t depth, thread_count;
    uint32_t queued_from, queued_count; /* ring over queue [depth] */
    uint32_t done_from, done_count;     /* ring over done [depth] */
    struct ft_read_progress *queue;     /* [depth] */
    struct ft_read_done *done;          /* [depth] */
    pthread_t threads[FT_PREAD_THREADS_MAX];
};

static int64_t read_fully(struct ft_read_progress *progress)
{
    int64_t result;
    for (;;) {
        ssize_t got = pread(progress->fd, ft_read_progress_destination(progress),
                            ft_read_progress_bytes(progress), (off_t)ft_read_progress_offset(progress));
        if (ft_read_progress_step(progress, got < 0 ? -errno : got, &result))
            return result;
        if (got < 0 && progress->retries > 10)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* EAGAIN: give the device a moment */
    }
}

static void *pool_thread(void *argument)
{
    struct ft_pread_pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && pool->queued_count == 0)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        struct ft_read_progress progress = pool->queue[pool->queued_from];
        pool->queued_from = (pool->queued_from + 1) % pool->depth;
        pool->queued_count--;
        pthread_mutex_unlock(&pool->lock);
        int64_t result = read_fully(&progress);
        pthread_mutex_lock(&pool->lock);
        pool->done[(pool->done_from + pool->done_count++) % pool->depth] =
            (struct ft_read_done){.tag = progress.read.tag, .result = result};
        pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int pool_start_threads(struct ft_pread_pool *pool, uint32_t thread_count, struct ft_error *err)
{
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int number = 0;
    while (pool->thread_count < thread_count && number == 0) {
        number = pthread_create(&pool->threads[pool->thread_count], NULL, pool_thread, pool);
        pool->thread_count += number == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->thread_count == 0) /* fewer than asked is slower, none is an error */
        return ft_error_set(
            err, FT_SYSTEM,
            "pread pool: no thread can be started: %s; raise the process limit (ulimit -u, pids.max) or the "
            "limit of address space (ulimit -v)",
            strerror(number));
    return FT_OK;
}

int ft_pread_pool_open(struct ft_pread_pool **out, uint32_t depth, uint32_t thread_count,
                       struct ft_error *err)
{
    *out = NULL;
    struct ft_pread_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return ft_error_set(err, FT_MEMORY, "pread pool: no memory");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, &attributes);
    pthread_condattr_destroy(&attributes);
    pool->depth = depth;
    pool->queue = calloc(depth, sizeof *pool->queue);
    pool->done = calloc(depth, sizeof *pool->done);
    int status;
    if (!pool->queue || !pool->done)
        status = ft_error_set(err, FT_MEMORY, "pread pool: no memory for a depth of %u", depth);
    else
        status = pool_start_threads(
            pool, FT_MIN(thread_count ? thread_count : FT_PREAD_THREADS, FT_PREAD_THREADS_MAX), err);
    if (status) {
        ft_pread_pool_close(pool);
        return status;
    }
    *out = pool;
    return FT_OK;
}

void ft_pread_pool_close(struct ft_pread_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->queue);
    free(pool->done);
    free(pool);
}

void ft_pread_pool_submit(struct ft_pread_pool *pool, const struct ft_read_progress *reads, uint32_t count)
{
    pthread_mutex_lock(&pool->lock);
    for (uint32_t i = 0; i < count; i++)
        pool->queue[(pool->queued_from + pool->queued_count++) % pool->depth] = reads[i];
    if (count == 1)
        pthread_cond_signal(&pool->work);
    else
        pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static struct timespec deadline_after(uint64_t timeout_ns)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    timeout_ns = FT_MIN(timeout_ns, UINT64_C(1000000000) * 86400 * 365); /* "for ever" must not overflow */
    uint64_t ns = (uint64_t)at.tv_nsec + timeout_ns % 1000000000u;
    at.tv_sec += (time_t)(timeout_ns / 1000000000u + ns / 1000000000u);
    at.tv_nsec = (long)(ns % 1000000000u);
    return at;
}

int ft_pread_pool_wait(struct ft_pread_pool *pool, struct ft_read_done *done, uint32_t cap, uint32_t wanted,
                       uint64_t timeout_ns, uint32_t *count, struct ft_error *err)
{
    struct timespec deadline = deadline_after(timeout_ns);
    int number = 0;
    pthread_mutex_lock(&pool->lock);
    while (pool->done_count < FT_MIN(wanted, cap) && number != ETIMEDOUT)
        number = pthread_cond_timedwait(&pool->finished, &pool->lock, &deadline);
    uint32_t n = FT_MIN(pool->done_count, cap);
    for (uint32_t i = 0; i < n; i++) {
        done[i] = pool->done[pool->done_from];
        pool->done_from = (pool->done_from + 1) % pool->depth;
    }
    pool->done_count -= n;
    pthread_mutex_unlock(&pool->lock);
    *count = n;
    if (n < FT_MIN(wanted, cap))
        return ft_error_set(err, FT_TIMEOUT, "pread pool: %u of %u reads finished in %llu ms", n, wanted,
                            (unsigned long long)(timeout_ns / 1000000u));
    return FT_OK;
}
