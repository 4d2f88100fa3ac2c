/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/interrupt.h"

#include "jobs/session.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>

static _Atomic(struct ft_session *) watched;
static atomic_int signal_seen;

static void on_signal(int number)
{
    /* Whoever presses Ctrl-C twice does not want to wait for the step. */
    if (atomic_exchange(&signal_seen, number)) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    struct ft_session *session = atomic_load(&watched);
    if (session)
        ft_session_interrupt(session);
}

void ft_interrupt_begin(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal; /* no SA_RESTART: a read of the terminal returns */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

void ft_interrupt_watch(struct ft_session *session)
{
    atomic_store(&watched, session);
    if (session && atomic_load(&signal_seen))
        ft_session_interrupt(session);
}

int ft_interrupt_signal(void)
{
    return atomic_load(&signal_seen);
}

void ft_interrupt_clear(void)
{
    atomic_store(&signal_seen, 0);
    struct ft_session *session = atomic_load(&watched);
    if (session)
        ft_session_clear_interrupt(session);
}
