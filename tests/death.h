// Tests of errors that end the process. The statement runs in a forked child whose standard error is read
// back: it must exit with status 1, and its message must contain each of the words given.
//
//     ASSERT_DIES(tokens_open("nowhere", 8, 256), "nowhere", "prepare.py");
//
// The child is a copy of this thread only: fork before OpenMP or MPI start their threads, or keep the
// statement free of both. No cmocka assertion inside it: the child would go on with the other tests.
#pragma once

#include "tests/cases.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DEATH_SURVIVED = 99, DEATH_TIMEOUT_S = 60 };

typedef struct death {
    pid_t child; // 0 in the child
    int message; // read end of its standard error
} death;

static inline death death_fork(void) {
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0) fail_msg("no pipe for a child");
    death d = {fork(), ends[0]};
    if (d.child < 0) fail_msg("no fork");
    if (d.child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        alarm(DEATH_TIMEOUT_S);
    }
    close(ends[1]);
    return d;
}

static inline void death_check(death d, const char *statement, const char *file, int line, const char *const *words) {
    char text[8192];
    size_t length = 0;
    ssize_t n;
    while (length < sizeof text - 1 && (n = read(d.message, text + length, sizeof text - 1 - length)) > 0) length += (size_t)n;
    text[length] = 0;
    close(d.message);
    int status = 0;
    if (waitpid(d.child, &status, 0) != d.child) fail_msg("%s:%d: the child is lost", file, line);
    if (WIFEXITED(status) && WEXITSTATUS(status) == DEATH_SURVIVED) fail_msg("%s:%d: %s survived", file, line, statement);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1)
        fail_msg("%s:%d: %s ended with wait status 0x%x, not exit status 1:\n%s", file, line, statement, status, text);
    if (strstr(text, "hint:  \n")) fail_msg("%s:%d: %s gives an empty hint:\n%s", file, line, statement, text);
    for (; *words; words++)
        if (!strstr(text, *words)) fail_msg("%s:%d: %s does not say '%s':\n%s", file, line, statement, *words, text);
}

#define ASSERT_DIES(statement, ...)                                                                                                \
    do {                                                                                                                           \
        const char *const death_words[] = {__VA_ARGS__, NULL};                                                                     \
        death death_now = death_fork();                                                                                            \
        if (death_now.child == 0) {                                                                                                \
            statement;                                                                                                             \
            _exit(DEATH_SURVIVED);                                                                                                 \
        }                                                                                                                          \
        death_check(death_now, #statement, __FILE__, __LINE__, death_words);                                                       \
    } while (0)

// What a user can mend must come with what to do.
#define ASSERT_REFUSED(statement, ...) ASSERT_DIES(statement, "hint:", __VA_ARGS__)
