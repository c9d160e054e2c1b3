// Reading and printing JSON. A field that is missing or of another type gives NULL or false; so does every field of a value that is
// not an object.
#pragma once
#include <cjson/cJSON.h>
#include <math.h>
#include "problem.h"

// cJSON keeps and prints fifteen digits exactly.
#define JSON_WHOLE_MAX INT64_C(999999999999999)

static inline const char *json_text(const cJSON *object, const char *name) {
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
}

static inline bool json_is(const cJSON *object, const char *name, const char *text) {
    const char *found = json_text(object, name);
    return found && strcmp(found, text) == 0;
}

static inline bool json_repeated(const cJSON *object, const cJSON *item) {
    return cJSON_GetObjectItemCaseSensitive(object, item->string) != item; // cJSON finds the first of that name
}

// The object that is all of a text. NULL: see `wrong`. `name` begins the message; a zero follows the bytes.
static inline cJSON *json_object(const char *text, int64_t bytes, const char *name, const char *hint, problem *wrong) {
    static const char blanks[] = " \t\r\n";
    const char *end = text, *line = text;
    int64_t lines = 1, column = 1;
    cJSON *value = cJSON_ParseWithOpts(text, &end, false);
    const bool object = cJSON_IsObject(value);
    if (object) end += strspn(end, blanks);
    if (object && end == text + bytes) return value;
    if (value && !object) end = text;
    const char *last = end > text ? end - 1 : text, *before = last; // where a name is missing, cJSON says one character too many
    while (before > text && strchr(blanks, before[-1])) before--;
    if (!value && before > text && strchr("{,", before[-1]) && !strchr(blanks, *last)) end = last;
    for (const char *next; (next = strchr(line, '\n')) && next < end; lines++) line = next + 1;
    for (; line < end; line++) column += (*line & 0xc0) != 0x80; // characters
    problem_set(wrong, hint, "%s %s a JSON object: see line %ld, column %ld", name,
                object ? "has more than" : "does not begin with", lines, column);
    cJSON_Delete(value);
    return NULL;
}

// A number from `low` to `high`; no NaN.
static inline bool json_number(const cJSON *object, const char *name, double low, double high, double *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= low && item->valuedouble <= high)) return false;
    *value = item->valuedouble;
    return true;
}

// A whole number from `low` to `high`, which JSON_WHOLE_MAX bounds.
static inline bool json_whole(const cJSON *object, const char *name, int64_t low, int64_t high, int64_t *value) {
    double found;
    if (!json_number(object, name, (double)low, (double)high, &found)) return false;
    *value = (int64_t)found;
    return (double)*value == found;
}

// The fewest digits, at least `digits`, that give the same number when read; null for NaN and infinity, which JSON lacks.
enum { JSON_NUMBER_TEXT = 32 };
static inline const char *json_print_number(double value, int digits, char text[JSON_NUMBER_TEXT]) {
    strcpy(text, "null");
    for (; digits <= 17 && isfinite(value); digits++) {
        snprintf(text, JSON_NUMBER_TEXT, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    return text;
}
