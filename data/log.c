// See log.h. A line is built as a cJSON object and printed compactly when it ends. Numbers go in as raw text,
// because cJSON holds every number as a double and prints 15 digits where those seem near enough.
//
// Whoever writes a log holds a lock on it, which goes with the process. A log is never written over: a run that begins
// where there is one gives it another name.
#include "log.h"
#include "durable.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KEPT_MAX = 9999 };

struct logfile {
    int fd;
    char *path;
    cJSON *line; // between log_begin and log_end
    int64_t missing;
    bool failing; // the last line could not be written
};

CF_NORETURN static void die_unwritable(const char *path) {
    cf_die(errno == ENOSPC || errno == EDQUOT || errno == EFBIG
               ? "free space on its disk, or give another --log"
               : "give another --log",
           "log %s cannot be written: %s", path, strerror(errno));
}

static void name_of(char name[PATH_MAX], const char *path, const char *suffix) {
    if (snprintf(name, PATH_MAX, "%s%s", path, suffix) >= PATH_MAX)
        cf_die("choose a shorter --log", "the name of log %s is too long", path);
}

static bool is_file(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

// Some file systems have no locks; a log without is better than none.
static int open_locked(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) die_unwritable(path);
    if (is_file(fd) && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        cf_die("wait for it, end it, or give another --log", "another run writes log %s", path);
    return fd;
}

static logfile *log_on(int fd, const char *path) {
    logfile *log = calloc(1, sizeof *log);
    if (log) log->path = strdup(path);
    if (!log || !log->path) cf_die(NULL, "out of memory for log %s", path);
    log->fd = fd;
    return log;
}

bool log_empty(const logfile *log) {
    return !log || lseek(log->fd, 0, SEEK_END) <= 0;
}

// The first of FILE.1, FILE.2, … that is free.
static void keep(const char *path) {
    char kept[PATH_MAX], suffix[16];
    for (int i = 1; i <= KEPT_MAX; i++) {
        snprintf(suffix, sizeof suffix, ".%d", i);
        name_of(kept, path, suffix);
        if (access(kept, F_OK) == 0) continue;
        if (rename(path, kept) != 0) die_unwritable(kept);
        printf("log       of an earlier run is kept as %s\n", kept);
        return;
    }
    cf_die("remove old ones, or give another --log", "there are %d logs of the name %s already", KEPT_MAX,
           path);
}

logfile *log_open(const char *path) {
    if (!path || !*path) return NULL;
    int fd = open_locked(path);
    if (is_file(fd) && lseek(fd, 0, SEEK_END) > 0) {
        keep(path);
        close(fd);
        fd = open_locked(path);
    }
    return log_on(fd, path);
}

// --- going on ---

static bool is(const cJSON *event, const char *name) {
    return strcmp(event->valuestring, name) == 0;
}

// A line that is no object of ours is somebody's, and stays.
static bool belongs(const char *line, int64_t step, bool watched) {
    cJSON *object = cJSON_Parse(line);
    const cJSON *event = cJSON_GetObjectItemCaseSensitive(object, "event"),
                *at = cJSON_GetObjectItemCaseSensitive(object, "step");
    bool stays = true;
    if (cJSON_IsString(event) && is(event, "end")) stays = false;
    if (cJSON_IsString(event) && cJSON_IsNumber(at)) {
        bool again =
            is(event, "step") || is(event, "skip") || (!watched && (is(event, "val") || is(event, "sample")));
        stays = at->valuedouble < (double)step + !again;
    }
    cJSON_Delete(object);
    return stays;
}

static void keep_lines(FILE *from, FILE *to, int64_t step, bool watched) {
    char *line = NULL;
    size_t room = 0;
    for (ssize_t length; (length = getline(&line, &room, from)) > 0;)
        if (line[length - 1] == '\n' && belongs(line, step, watched)) fwrite(line, 1, (size_t)length, to);
    free(line);
}

// What is kept of the log takes its place.
static void replace(const char *path, int64_t step, bool watched) {
    char target[PATH_MAX], kept[PATH_MAX];
    if (!realpath(path, target)) die_unwritable(path); // a link stays one
    name_of(kept, target, ".tmp");
    FILE *from = fopen(target, "r"), *to = fopen(kept, "w");
    if (!from) die_unwritable(target);
    if (!to) die_unwritable(kept);
    keep_lines(from, to, step, watched);
    bool read = !ferror(from), written = !ferror(to) && fflush(to) == 0 && fsync(fileno(to)) == 0;
    fclose(from);
    if (fclose(to) != 0 || !written || !read || rename(kept, target) != 0) {
        int error = errno;
        unlink(kept);
        errno = error;
        die_unwritable(path);
    }
}

logfile *log_continue(const char *path, int64_t step, bool watched) {
    if (!path || !*path) return NULL;
    int fd = open_locked(path);
    if (!is_file(fd)) return log_on(fd, path);
    replace(path, step, watched);
    int kept = open_locked(path);
    close(fd); // and with it the lock on the old one
    return log_on(kept, path);
}

// --- writing ---

// Every addition comes through here: the object is there, and cJSON had memory.
static void check(const logfile *log, const void *added, const char *name) {
    if (!log->line) cf_die(NULL, "log %s: %s outside log_begin and log_end", log->path, name);
    if (!added) cf_die(NULL, "log %s: out of memory for %s", log->path, name);
}

void log_begin(logfile *log, const char *event) {
    if (!log) return;
    if (log->line) cf_die(NULL, "log %s: %s begins within another line", log->path, event);
    log->line = cJSON_CreateObject();
    log_text(log, "event", event);
}

void log_int(logfile *log, const char *name, int64_t value) {
    if (!log) return;
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    check(log, cJSON_AddRawToObject(log->line, name, text), name);
}

void log_real(logfile *log, const char *name, double value) {
    if (!log) return;
    char text[40] = "null"; // JSON has no NaN and no infinity
    for (int digits = 15; digits <= 17 && isfinite(value); digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    check(log, cJSON_AddRawToObject(log->line, name, text), name);
}

// Length of the valid UTF-8 sequence at s, or 0: no overlong forms, no surrogates, nothing past U+10FFFF.
static int utf8_length(const unsigned char *s) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xC2 && s[0] <= 0xDF   ? 2
                 : (s[0] & 0xF0) == 0xE0        ? 3
                 : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4
                                                : 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0; // the terminator too
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
    if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
    return length;
}

void log_text(logfile *log, const char *name, const char *value) {
    if (!log) return;
    char *clean = malloc(3 * strlen(value) + 1), *to = clean;
    if (!clean) cf_die(NULL, "log %s: out of memory for %s", log->path, name);
    while (*value) {
        int length = utf8_length((const unsigned char *)value);
        memcpy(to, length ? value : "\xEF\xBF\xBD", length ? (size_t)length : 3);
        to += length ? length : 3;
        value += length ? length : 1;
    }
    *to = 0;
    check(log, cJSON_AddStringToObject(log->line, name, clean), name);
    free(clean);
}

// A line is there whole or not at all.
static void write_line(logfile *log, char *text) {
    const int64_t length = (int64_t)strlen(text), whole = lseek(log->fd, 0, SEEK_END);
    text[length] = '\n'; // in place of the terminator
    const bool written = durable_write(log->fd, text, length + 1);
    if (!written && !log->failing)
        fprintf(stderr, "\nwarning: log %s cannot be written: %s; the run goes on without these lines\n",
                log->path, strerror(errno));
    if (!written && whole >= 0 && is_file(log->fd) && ftruncate(log->fd, whole) != 0)
        log->missing++; // and one is cut short
    log->missing += !written;
    log->failing = !written;
}

void log_end(logfile *log) {
    if (!log) return;
    check(log, log->line, "log_end");
    char *text = cJSON_PrintUnformatted(log->line);
    check(log, text, "the line");
    write_line(log, text);
    cJSON_free(text);
    cJSON_Delete(log->line);
    log->line = NULL;
}

int64_t log_missing(const logfile *log) {
    return log ? log->missing : 0;
}

void log_sync(const logfile *log) {
    if (log) fsync(log->fd);
}

void log_close(logfile *log) {
    if (!log) return;
    cJSON_Delete(log->line);
    close(log->fd);
    free(log->path);
    free(log);
}
