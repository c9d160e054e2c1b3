// See progress.h. The process has one standard output, so what stands on its current line is a static.
#include "progress.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATIENCE_MS = 100 };

static int shown; // characters of the line in place

bool progress_on_terminal(void) {
    if (!isatty(STDOUT_FILENO)) return false;
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return true;
    char path[64], target[256];
    snprintf(path, sizeof path, "/proc/%d/fd/1", (int)getppid());
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length <= 0) return false;
    target[length] = 0;
    return strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0;
}

// A launcher that is ending everything, or a pager, may not read for a while: a run that waited for it would not notice
// that it is to end, or would stand.
static bool somebody_reads(void) {
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&out, 1, PATIENCE_MS) != 0;
}

void progress_show(const char *line, bool last) {
    int length = (int)strlen(line);
    if (!somebody_reads()) return;
    if (!progress_on_terminal())
        printf("%s\n", line);
    else
        printf("\r%s%*s%s", line, shown > length ? shown - length : 0, "", last ? "\n" : "");
    shown = last || !progress_on_terminal() ? 0 : length;
    fflush(stdout);
}

void progress_break(void) {
    if (shown) printf("\n");
    shown = 0;
}
