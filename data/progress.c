// See progress.h. The process has one standard output, so what is on its current line is a static.
#include "progress.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { PATIENCE_MS = 100, COLUMNS = 80, LONGEST = 1023, SHOWN_ALWAYS = 2 };

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

static int columns(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : COLUMNS;
}

// Where a field begins, with its tab in front.
static char *field(char *line, int number) {
    for (; line && number > 0; number--) line = strchr(line + 1, '\t');
    return line;
}

void progress_show(const char *line, bool last) {
    // A launcher that is ending everything, or a pager, may not read for a while: a run that waited for it would not notice
    // that it is to end, or would stop.
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    if (poll(&out, 1, PATIENCE_MS) == 0) return;
    const bool terminal = progress_on_terminal();
    char text[LONGEST + 1];
    snprintf(text, sizeof text / 2, "%s", line);
    // A line that is longer than the terminal is wide would not be replaced by the next, but pushed up.
    int over = (int)strlen(text) - columns();
    for (const char *at = text; *at; at++) over += *at == '\t'; // shown as two blanks
    while (terminal && over >= 0) {
        char *gives_way = field(text, SHOWN_ALWAYS), *next = field(gives_way, 1);
        if (!next) break;
        over -= (int)(next - gives_way) + 1;
        memmove(gives_way, next, strlen(next) + 1);
    }
    for (char *tab; (tab = strchr(text, '\t')); tab[0] = tab[1] = ' ') memmove(tab + 1, tab, strlen(tab) + 1);
    if (terminal) text[columns() - 1 < LONGEST ? columns() - 1 : LONGEST] = 0;
    int length = (int)strlen(text);
    if (terminal)
        printf("\r%s%*s%s", text, shown > length ? shown - length : 0, "", last ? "\n" : "");
    else
        printf("%s\n", text);
    shown = last || !terminal ? 0 : length;
    fflush(stdout);
}

void progress_break(void) {
    if (shown) printf("\n");
    shown = 0;
}
