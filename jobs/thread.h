/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting a thread that runs jobs: with a stack of its own size, since the limit that it would inherit (ulimit -s) may
 * be far smaller. Returns 0 or an errno; the thread is joined by whoever started it.
 */
#ifndef FT_JOBS_THREAD_H
#define FT_JOBS_THREAD_H

#include <pthread.h>

int ft_thread_start(pthread_t *thread, void *(*run)(void *), void *context);

#endif
