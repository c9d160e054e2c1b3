// The log: one JSON object a line. Rank 0 writes it; a log that is NULL is allowed and ignored.
// A line that cannot be written (disk full) is reported and left out, and training continues: see log_complete().
//
//     LOG_LINE(log, "val", FIELD("step", step), FIELD("loss", loss));
#pragma once
#include "../problem.h"

typedef struct logfile logfile;
// path NULL or "": no log, NULL. Dies if the file cannot be written, or if the shell has redirected this program to it.
// step 0: a new log; an existing file becomes PATH.1, or .2, ….
// Otherwise `run` resumes at that step: the log keeps steps, validation and samples before it, and other events up to it. The rest,
// "end", "audit" and a cut line are removed, because the run writes them again. The file is replaced as a whole. If there is none,
// or its first "config" is of another "run": a new log.
logfile *log_open(const char *path, const char *run, int64_t step);
bool log_empty(const logfile *log); // no line yet

// FIELD("loss", 3.2): a number or a text. Numbers keep all digits (NaN and infinity become null); whole numbers are exact below
// 2^53. A byte that may not be printed (sanitize.h) becomes '?'. A field without a name is left out.
typedef struct log_field {
    const char *name, *text; // text NULL: a number
    double number;
} log_field;
#define FIELD(name, value)                                                                                                         \
    { name, WHERE_TEXT(value, value, NULL), WHERE_TEXT(value, 0, value) }
#define WHERE_TEXT(value, then, otherwise) _Generic((value), char * : (then), const char * : (then), default : (otherwise))
void log_begin(logfile *log, const char *event);
void log_add(logfile *log, const log_field *field, size_t fields);
void log_texts(logfile *log, const char *name, char **text, int texts); // a list of texts
void log_end(logfile *log);                                             // writes the line
#define LOG_ADD(log, ...)                                                                                                          \
    log_add(log, (const log_field[]){__VA_ARGS__}, sizeof((const log_field[]){__VA_ARGS__}) / sizeof(log_field))
#define LOG_LINE(log, event, ...) (log_begin(log, event), LOG_ADD(log, __VA_ARGS__), log_end(log))

bool log_complete(const logfile *log); // false, and it has said so: lines were lost
void log_sync(logfile *log);           // writes all lines so far to the disk, or warns. Any thread may call it
void log_close(logfile *log);
