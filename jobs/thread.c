/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/thread.h"

#define STACK_BYTES ((size_t)4 << 20)

int ft_thread_start(pthread_t *thread, void *(*run)(void *), void *context)
{
    pthread_attr_t attr;
    int error = pthread_attr_init(&attr);
    if (error)
        return error;
    error = pthread_attr_setstacksize(&attr, STACK_BYTES);
    if (!error)
        error = pthread_create(thread, &attr, run, context);
    pthread_attr_destroy(&attr);
    return error;
}
