// See streams.h. Prints go into a pipe, and a thread writes from there what the standard output takes. Only stdout is treated like
// this: messages of errors may wait.
#define _GNU_SOURCE
#include "streams.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { PIECE = 1024, PIPE = 1 << 20 }; // bytes; a pipe that may not be so large holds 64 KiB

static int from = -1;
static bool held; // atomic: the thread holds text that is in the pipe no more, or soon

static void *write_on(void *unused) {
    struct pollfd text_in = {.fd = from, .events = POLLIN}, room = {.fd = STDOUT_FILENO, .events = POLLOUT};
    for (char text[PIECE];;) {
        if (poll(&text_in, 1, -1) <= 0) continue; // a signal: nothing to hold
        __atomic_store_n(&held, true, __ATOMIC_SEQ_CST);
        const ssize_t bytes = read(from, text, sizeof text);
        for (ssize_t at = 0, written; at<bytes; at += written> 0 ? written : 0) {
            written = write(STDOUT_FILENO, text + at, (size_t)(bytes - at));
            if (written < 0 && errno == EAGAIN) poll(&room, 1, -1);
            if (written < 0 && errno != EAGAIN && errno != EINTR) break; // nobody can read it
        }
        __atomic_store_n(&held, false, __ATOMIC_SEQ_CST);
    }
    return unused;
}

static void drain_at_exit(void) {
    cf_streams_drain(-1);
}

void cf_streams_open(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) abort(); // it gets the lowest number
    int ends[2];
    pthread_t thread;
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    FILE *stream = fdopen(ends[1], "w");
    from = ends[0];
    if (!stream || pthread_create(&thread, NULL, write_on, NULL) != 0) return;
    fcntl(from, F_SETPIPE_SZ, PIPE);
    if (isatty(STDOUT_FILENO)) setvbuf(stream, NULL, _IOLBF, 0);
    stdout = stream;
    atexit(drain_at_exit);
}

int cf_streams_waiting(void) {
    int bytes = 0;
    ioctl(from, FIONREAD, &bytes); // first: what leaves the pipe is held by then
    return bytes + __atomic_load_n(&held, __ATOMIC_SEQ_CST);
}

void cf_streams_drain(int wait_ms) {
    fflush(stdout);
    for (; wait_ms != 0 && cf_streams_waiting() > 0; wait_ms -= wait_ms > 0) poll(NULL, 0, 1);
}
