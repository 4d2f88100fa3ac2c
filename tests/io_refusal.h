/* SPDX-License-Identifier: Apache-2.0 */
/* A child process in which a system call, or O_DIRECT, is refused, as a container or a filesystem refuses it. */
#ifndef FT_TESTS_IO_REFUSAL_H
#define FT_TESTS_IO_REFUSAL_H

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static inline int install_filter(struct sock_filter *program, size_t count)
{
    struct sock_fprog filter = {.len = (unsigned short)count, .filter = program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

/* The system call returns `number` from now on, in this process; needs no root. */
static inline int refuse_call(unsigned call, int number)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)number),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return install_filter(program, sizeof program / sizeof program[0]);
}

static inline int refuse_io_uring(int number)
{
    return refuse_call(__NR_io_uring_setup, number);
}

/* Rings can be made, but not asked what they know. */
static inline int refuse_io_uring_register(int number)
{
    return refuse_call(__NR_io_uring_register, number);
}

static inline int refuse_affinity(int number)
{
    return refuse_call(__NR_sched_getaffinity, number);
}

/* openat with O_DIRECT returns `number` from now on: a filesystem without direct reads. */
static inline int refuse_direct(int number)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_openat, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                 offsetof(struct seccomp_data, args[2])), /* low half, little endian */
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_DIRECT, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)number),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return install_filter(program, sizeof program / sizeof program[0]);
}

/* Runs `body` in a child after `prepare`; its exit code, 77 when prepare is refused, -1 when it died. */
static inline int run_in_child(int (*prepare)(int), int argument, int (*body)(void))
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int code = prepare(argument) != 0 ? 77 : body();
        fflush(NULL);
        _exit(code);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

#endif
