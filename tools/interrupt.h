/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ctrl-C, SIGTERM and SIGHUP (the terminal is gone): the first asks the running step, or the load, to end
 * cleanly; the second kills as usual. A SIGHUP that nohup made ignored stays ignored.
 *
 * A signal handler has no argument, so this module holds the one piece of global state of the program: the
 * number of the signal and the session to interrupt. The handler only stores and calls ft_session_interrupt,
 * which is async-signal-safe. SIGPIPE is ignored, so that a closed reader is seen as a failed write, and so
 * is SIGXFSZ (ulimit -f): half-written files are cut back or removed.
 */
#ifndef FT_TOOLS_INTERRUPT_H
#define FT_TOOLS_INTERRUPT_H

#include <stdbool.h>

struct ft_session;

void ft_interrupt_begin(void);
/* From here on the first signal kills: for measurements that leave nothing behind and ask nobody in their loops. */
void ft_interrupt_end(void);
/* The session to interrupt; NULL before it is closed. A signal that came earlier interrupts it at once. */
void ft_interrupt_watch(struct ft_session *session);
/* 0, or the signal that came since the last clear. */
int ft_interrupt_signal(void);
/* Becomes readable when a signal comes: who waits for input polls it too, because the handler may run in any
 * thread. -1 when there is none. */
int ft_interrupt_fd(void);
/* Forgets the signal and lets the session step again. */
void ft_interrupt_clear(void);

#endif
