// See log.h. A line is built as a cJSON object and printed compactly when it ends. Numbers go in as raw text,
// because cJSON holds every number as a double and prints 15 digits where those seem near enough.
#include "log.h"
#include "../commfuse/die.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct logfile {
    FILE *file;
    char *path;
    cJSON *line; // between log_begin and log_end
};

CF_NORETURN static void die_unwritable(const char *path) {
    cf_die("free space on its disk, or give another --log", "log %s cannot be written: %s", path,
           strerror(errno));
}

static logfile *open_as(const char *path, const char *mode) {
    if (!path || !*path) return NULL;
    logfile *log = calloc(1, sizeof *log);
    if (log) log->path = strdup(path);
    if (!log || !log->path) cf_die(NULL, "out of memory for log %s", path);
    log->file = fopen(path, mode);
    if (!log->file) die_unwritable(path);
    return log;
}

logfile *log_open(const char *path) {
    return open_as(path, "w");
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

logfile *log_continue(const char *path, int64_t step, bool watched) {
    char kept[PATH_MAX];
    struct stat status;
    if (!path || !*path) return NULL;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return open_as(path, "w"); // new, or a pipe
    FILE *from = fopen(path, "r");
    if (!from) die_unwritable(path);
    if (snprintf(kept, sizeof kept, "%s.tmp", path) >= (int)sizeof kept)
        cf_die("choose a shorter --log", "the name of log %s is too long", path);
    FILE *to = fopen(kept, "w");
    if (!to) die_unwritable(kept);
    keep_lines(from, to, step, watched);
    bool read = !ferror(from), written = !ferror(to) && fflush(to) == 0 && fsync(fileno(to)) == 0;
    fclose(from);
    if (fclose(to) != 0 || !written || !read || rename(kept, path) != 0) {
        int error = errno;
        unlink(kept);
        errno = error;
        die_unwritable(path);
    }
    return open_as(path, "a");
}

bool log_empty(const logfile *log) {
    return !log || (fseek(log->file, 0, SEEK_END) == 0 && ftell(log->file) == 0);
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

void log_end(logfile *log) {
    if (!log) return;
    check(log, log->line, "log_end");
    char *text = cJSON_PrintUnformatted(log->line);
    check(log, text, "the line");
    if (fprintf(log->file, "%s\n", text) < 0 || fflush(log->file) != 0) die_unwritable(log->path);
    cJSON_free(text);
    cJSON_Delete(log->line);
    log->line = NULL;
}

void log_sync(const logfile *log) {
    if (log) fsync(fileno(log->file));
}

void log_close(logfile *log) {
    if (!log) return;
    cJSON_Delete(log->line);
    if (fclose(log->file) != 0) cf_die(NULL, "log %s cannot be closed: %s", log->path, strerror(errno));
    free(log->path);
    free(log);
}
