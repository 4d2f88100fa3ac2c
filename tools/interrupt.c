/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/interrupt.h"

#include "jobs/session.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static _Atomic(struct ft_session *) watched;
static atomic_int signal_seen;
static int event_fd = -1;
static bool tells; /* somebody sits in front of it */

static void on_signal(int number)
{
    /* Whoever presses Ctrl-C twice does not want to wait for the step. */
    if (atomic_exchange(&signal_seen, number)) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    static const char text[] = "\nft: interrupted: the work at hand ends first; a second time stops at once\n";
    uint64_t one = 1;
    int saved = errno;
    if (tells && write(STDERR_FILENO, text, sizeof text - 1) < 0)
        errno = saved; /* nobody reads it */
    if (event_fd >= 0 && write(event_fd, &one, sizeof one) < 0)
        errno = saved; /* it is readable already */
    struct ft_session *session = atomic_load(&watched);
    if (session)
        ft_session_interrupt(session);
}

void ft_interrupt_begin(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    tells = isatty(STDERR_FILENO) == 1;
    event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    action.sa_handler = on_signal; /* no SA_RESTART: a read of the terminal returns */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (signal(SIGHUP, SIG_IGN) != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

void ft_interrupt_end(void)
{
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    if (signal(SIGHUP, SIG_DFL) == SIG_IGN)
        signal(SIGHUP, SIG_IGN);
    int seen = atomic_load(&signal_seen);
    if (seen)
        raise(seen);
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

int ft_interrupt_fd(void)
{
    return event_fd;
}

void ft_interrupt_clear(void)
{
    uint64_t count;
    if (event_fd >= 0 && read(event_fd, &count, sizeof count) < 0)
        count = 0; /* nothing to forget */
    atomic_store(&signal_seen, 0);
    struct ft_session *session = atomic_load(&watched);
    if (session)
        ft_session_clear_interrupt(session);
}
