// See streams.h. A descriptor's O_NONBLOCK is shared with all processes that have it, such as the shell; so a terminal or pipe is
// opened again. Only stdout, whose lock guards `out`, is treated like this: messages of errors may wait.
#define _GNU_SOURCE
#include "streams.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 4096, LONGEST = 64 << 20 }; // bytes; what may wait is more than a run prints beside its steps

static struct {
    int fd;
    char *text;
    size_t begin, end, room; // what waits is text[begin, end)
} out = {.fd = STDOUT_FILENO};

// Pieces are so small that where there is room at all, there is room for one (a socket's descriptor cannot be opened again).
static void write_waiting(int wait_ms) {
    struct pollfd look = {.fd = out.fd, .events = POLLOUT};
    while (out.begin < out.end) {
        if (poll(&look, 1, wait_ms) == 0) return;
        const ssize_t written = write(out.fd, out.text + out.begin, out.end - out.begin < PIECE ? out.end - out.begin : PIECE);
        if (written < 0 && errno != EAGAIN && errno != EINTR) break; // nobody can read it
        out.begin += written > 0 ? (size_t)written : 0;
    }
    out.begin = out.end = 0;
}

static ssize_t append(void *unused, const char *text, size_t bytes) {
    (void)unused;
    if (out.end - out.begin > LONGEST) write_waiting(-1);
    if (out.end + bytes > out.room) {
        memmove(out.text, out.text + out.begin, out.end - out.begin);
        out.end -= out.begin, out.begin = 0;
    }
    if (out.end + bytes > out.room) {
        char *more = realloc(out.text, 2 * (out.end + bytes));
        if (!more) return 0;
        out.text = more, out.room = 2 * (out.end + bytes);
    }
    memcpy(out.text + out.end, text, bytes);
    out.end += bytes;
    write_waiting(0);
    return (ssize_t)bytes;
}

static void drain_at_exit(void) {
    cf_streams_drain(-1);
}

void cf_streams_open(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) abort(); // it gets the lowest number
    struct stat is;
    const bool terminal = isatty(STDOUT_FILENO);
    FILE *stream = fopencookie(NULL, "w", (cookie_io_functions_t){.write = append});
    if (!stream) return;
    if (terminal || (fstat(STDOUT_FILENO, &is) == 0 && S_ISFIFO(is.st_mode)))
        out.fd = open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (out.fd < 0) out.fd = STDOUT_FILENO;
    if (terminal) setvbuf(stream, NULL, _IOLBF, 0);
    stdout = stream;
    atexit(drain_at_exit);
}

int64_t cf_streams_waiting(void) {
    flockfile(stdout);
    write_waiting(0);
    const int64_t waiting = (int64_t)(out.end - out.begin);
    funlockfile(stdout);
    return waiting;
}

void cf_streams_drain(int wait_ms) {
    fflush(stdout);
    flockfile(stdout);
    write_waiting(wait_ms);
    funlockfile(stdout);
}
