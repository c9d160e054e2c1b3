// See log.h. A log is never overwritten: a run that finds the log of another run renames it. If that one still writes, it goes on
// in the renamed file. The lock of --out keeps two writers from resuming one run.
//
// Numbers are added as text, because cJSON prints a double with 15 digits if they come near enough.
#include "log.h"
#include "../../commfuse/base/streams.h"
#include "../atomic_file.h"
#include "../json.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READER_MS = 1000 };

struct logfile {
    int fd;
    bool regular; // neither a device nor a pipe
    bool shown;   // where the standard output goes, too
    char path[PATH_MAX];
    cJSON *line;  // between log_begin and log_end
    bool failing; // the last line could not be written
    atomic_bool incomplete;
};

CF_NORETURN static void die_unwritable(const char *path) {
    cf_die(errno == ENXIO ? "nobody reads this pipe: start its reader first, or give another --log; a socket cannot be opened"
           : errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? "free space on its disk, or give another --log"
                                                                  : "give another --log",
           "log %s cannot be written: %s", path, strerror(errno));
}

static void open_file(logfile *log, const char *path) {
    struct stat status;
    if (log->fd >= 0) close(log->fd); // the old file has been renamed
    // A pipe that nobody reads must hold up nothing.
    log->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
    if (log->fd < 0 || fstat(log->fd, &status) != 0) die_unwritable(path);
    log->regular = S_ISREG(status.st_mode), log->shown = atomic_file_inherited(&status, STDERR_FILENO);
    if (log->regular && atomic_file_inherited(&status, ATOMIC_FILE_FDS))
        cf_die("name a file of its own; a pipe may be shared: --log /dev/stdout | tee FILE",
               "log %s: the shell has redirected this program to this file: its lines would overwrite others, or move with it",
               path);
}

bool log_empty(const logfile *log) {
    return !log || lseek(log->fd, 0, SEEK_END) <= 0;
}

// Renames the log to the first of FILE.1, FILE.2, … that is free.
static void rename_old(logfile *log, const char *whose) {
    char name[PATH_MAX + 16];
    int number = 1;
    do snprintf(name, sizeof name, "%s.%d", log->path, number++);
    while (access(name, F_OK) == 0);
    if (rename(log->path, name) != 0) die_unwritable(name);
    cf_print(stdout, "log       of %s run renamed to %s\n", whose, name);
}

// --- resuming ---

// Lines of other programs stay.
static bool stays(const cJSON *line, int64_t step) {
    double at;
    if (json_is(line, "event", "end") || json_is(line, "event", "audit")) return false;
    if (!json_text(line, "event") || !json_number(line, "step", -INFINITY, INFINITY, &at)) return true;
    const bool again = json_is(line, "event", "step") || json_is(line, "event", "val") || json_is(line, "event", "sample") ||
                       json_is(line, "event", "plan");
    return at < (double)step + !again;
}

// Replaces the log by the lines that stay. False, with the log unchanged, if its first "config" is of another run.
static bool cut(const logfile *log, const char *run, int64_t step) {
    problem why;
    atomic_file replacement;
    char *text = NULL;
    size_t room = 0;
    bool ours = false;
    FILE *from = fopen(log->path, "re");
    if (!from) die_unwritable(log->path);
    bool ok = atomic_file_create(&replacement, log->path, -1, &why);
    for (ssize_t length; ok && (length = getline(&text, &room, from)) > 0;) {
        if (text[length - 1] != '\n') break; // cut short
        cJSON *line = cJSON_Parse(text);
        const bool config = json_is(line, "event", "config");
        ours |= config && json_is(line, "run", run);
        if (stays(line, step)) ok = atomic_file_append(&replacement, text, length, &why);
        cJSON_Delete(line);
        if (config && !ours) break; // all of it is another run's
    }
    ok = ok && (!ferror(from) || atomic_file_problem(&why, "cannot read", log->path, -1)) &&
         (!ours || atomic_file_commit(&replacement, &why));
    atomic_file_abandon(&replacement);
    fclose(from);
    free(text);
    if (!ok) cf_die(*why.hint ? why.hint : "give another --log", "log: %s", why.what);
    return ours;
}

logfile *log_open(const char *path, const char *run, int64_t step) {
    if (!path || !*path) return NULL;
    logfile *log = cf_host_alloc(1, sizeof *log, path);
    log->fd = -1;
    open_file(log, path);
    snprintf(log->path, sizeof log->path, "%s", path);    // which open() has not found too long
    if (!log->regular) return log;                        // a device or a pipe keeps no lines
    if (!realpath(path, log->path)) die_unwritable(path); // so that a link stays a link
    if (log_empty(log)) return log;
    if (step == 0 || !cut(log, run, step)) rename_old(log, step > 0 ? "another" : "an earlier");
    open_file(log, log->path);
    return log;
}

// --- writing ---

void log_begin(logfile *log, const char *event) {
    if (!log) return;
    log->line = cJSON_CreateObject();
    LOG_ADD(log, FIELD("event", event));
}

void log_add(logfile *log, const log_field *field, size_t fields) {
    char number[JSON_NUMBER_TEXT];
    for (const log_field *f = field; log && f < field + fields; f++) {
        if (!f->name) continue;
        const cJSON *added = f->text ? cJSON_AddStringToObject(log->line, f->name, f->text)
                                     : cJSON_AddRawToObject(log->line, f->name, json_print_number(f->number, 15, number));
        if (!added) cf_die(NULL, "log %s: out of memory for %s", log->path, f->name);
    }
}

void log_texts(logfile *log, const char *name, char **text, int texts) {
    cJSON *list = log ? cJSON_CreateStringArray((const char *const *)text, texts) : NULL;
    if (log && !cJSON_AddItemToObject(log->line, name, list)) cf_die(NULL, "log %s: out of memory for %s", log->path, name);
}

// A line is written whole or not at all.
void log_end(logfile *log) {
    if (!log) return;
    char *text = cJSON_PrintUnformatted(log->line);
    if (!text) cf_die(NULL, "log %s: out of memory for a line", log->path);
    if (log->shown && !log->failing) cf_streams_drain(READER_MS); // so that each line of both is whole
    const int64_t length = (int64_t)strlen(text), size = lseek(log->fd, 0, SEEK_END);
    cf_sanitize(text);
    text[length] = '\n'; // in place of the terminator
    bool written = atomic_file_write(log->fd, text, length + 1);
    struct pollfd reader = {.fd = log->fd, .events = POLLOUT}; // one that has stopped is waited for once
    if (!written && errno == EAGAIN && !log->failing && poll(&reader, 1, READER_MS) >= 0)
        written = atomic_file_write(log->fd, text, length + 1);
    if (!written && !log->failing)
        cf_print(stderr, "\nwarning: log %s cannot be written: %s; training continues without these lines\n", log->path,
                 strerror(errno));
    if (!written && log->regular) (void)!ftruncate(log->fd, size); // if even this fails, the line stays cut short
    if (!written) atomic_store(&log->incomplete, true);
    log->failing = !written;
    cJSON_free(text);
    cJSON_Delete(log->line);
    log->line = NULL;
}

bool log_complete(const logfile *log) {
    if (!log) return true;
    const bool incomplete = atomic_load(&log->incomplete);
    if (incomplete) cf_print(stderr, "error: log %s lacks lines, or its disk may: see the warnings above\n", log->path);
    return !incomplete;
}

void log_sync(logfile *log) {
    if (!log || !log->regular || atomic_file_sync(log->fd, log->path) || atomic_exchange(&log->incomplete, true)) return;
    cf_print(stderr, "\nwarning: log %s cannot be synced: %s; training continues\n", log->path, strerror(errno));
}

void log_close(logfile *log) {
    if (!log) return;
    cJSON_Delete(log->line);
    close(log->fd);
    free(log);
}
