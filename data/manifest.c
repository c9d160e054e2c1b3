// See manifest.h. The line with the manifest's own hash is always the last and always of the same form, so it
// is compared as text: there is one right ending for a given text above it, and any other is damage. Only
// then is the rest parsed, and it is still believed nothing: a manifest may be sealed and wrong, written by
// another program.
#include "manifest.h"
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { VERSION = 1, SEAL = 40 }; // SEAL: room for the last line
static const char format[] = "commfuse checkpoint";
static const int64_t max_number = INT64_C(999999999999999); // fifteen digits: what cJSON prints exactly

void manifest_file_name(int64_t rank, char name[MANIFEST_FILE_NAME]) {
    snprintf(name, MANIFEST_FILE_NAME, "rank_%05lld.safetensors", (long long)rank);
}

const char *manifest_value(const manifest *m, const char *name) {
    for (int64_t i = 0; i < m->options; i++)
        if (strcmp(m->option[i].name, name) == 0) return m->option[i].value;
    return NULL;
}

static void make_seal(const char *text, int64_t size, char seal[SEAL]) {
    snprintf(seal, SEAL, "\t\"xxh64\":\t\"%016" PRIx64 "\"\n}\n", (uint64_t)XXH64(text, (size_t)size, 0));
}

// --- writing -----------------------------------------------------------------------------------------------

// cJSON returns NULL for want of memory, and takes NULL for an object; so looking once at the end is not
// enough.
static void *got(void *item) {
    if (!item) cf_die(NULL, "out of memory for a checkpoint's manifest");
    return item;
}

static void add_options(cJSON *root, const manifest *m) {
    cJSON *options = got(cJSON_AddObjectToObject(root, "options"));
    for (int64_t i = 0; i < m->options; i++) {
        if (cJSON_GetObjectItemCaseSensitive(options, m->option[i].name))
            cf_die(NULL, "a checkpoint's option %s is there twice", m->option[i].name);
        got(cJSON_AddStringToObject(options, m->option[i].name, m->option[i].value));
    }
}

static void add_files(cJSON *root, const manifest *m) {
    cJSON *files = got(cJSON_AddArrayToObject(root, "files"));
    for (int64_t rank = 0; rank < m->ranks; rank++) {
        char name[MANIFEST_FILE_NAME], hash[17];
        manifest_file_name(rank, name);
        snprintf(hash, sizeof hash, "%016" PRIx64, m->file[rank].hash);
        cJSON *file = got(cJSON_CreateObject());
        cJSON_AddItemToArray(files, file);
        got(cJSON_AddStringToObject(file, "name", name));
        got(cJSON_AddNumberToObject(file, "bytes", (double)m->file[rank].bytes));
        got(cJSON_AddStringToObject(file, "xxh64", hash));
    }
}

char *manifest_print(const manifest *m, int64_t *size) {
    if (m->ranks < 1 || m->ranks > MANIFEST_MAX_RANKS || m->step < 0 || m->step > max_number)
        cf_die(NULL, "no manifest for step %lld of %lld ranks", (long long)m->step, (long long)m->ranks);
    cJSON *root = got(cJSON_CreateObject());
    got(cJSON_AddStringToObject(root, "format", format));
    got(cJSON_AddNumberToObject(root, "version", VERSION));
    got(cJSON_AddNumberToObject(root, "step", (double)m->step));
    got(cJSON_AddNumberToObject(root, "ranks", (double)m->ranks));
    add_options(root, m);
    add_files(root, m);
    char *body = got(cJSON_Print(root)), seal[SEAL];
    cJSON_Delete(root);
    size_t length = strlen(body) - 2; // the last two are "\n}", and ",\n" comes there
    char *text = got(malloc(length + 2 + SEAL));
    memcpy(text, body, length);
    memcpy(text + length, ",\n", 2);
    free(body);
    make_seal(text, (int64_t)length + 2, seal);
    memcpy(text + length + 2, seal, strlen(seal) + 1);
    *size = (int64_t)(length + 2 + strlen(seal));
    return text;
}

// --- reading -----------------------------------------------------------------------------------------------

static const char damaged[] = "the checkpoint is damaged, or was not copied completely";

static bool sealed(const char *text, int64_t size) {
    char seal[SEAL];
    make_seal(text, 0, seal); // for its length, always the same
    int64_t length = (int64_t)strlen(seal), above = size - length;
    if (above < 0) return false;
    make_seal(text, above, seal);
    return memcmp(text + above, seal, (size_t)length) == 0;
}

// A whole number from `low` to `high`.
static bool whole(const cJSON *item, int64_t low, int64_t high, int64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= (double)low && item->valuedouble <= (double)high))
        return false;
    *value = (int64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

static bool text_is(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

// Sixteen digits, as they are printed.
static bool read_hash(const cJSON *item, uint64_t *hash) {
    if (!cJSON_IsString(item) || strlen(item->valuestring) != 16) return false;
    if (strspn(item->valuestring, "0123456789abcdef") != 16) return false;
    *hash = strtoull(item->valuestring, NULL, 16);
    return true;
}

static bool read_files(manifest *m, const cJSON *files, const char *name, problem *why) {
    if (!cJSON_IsArray(files) || cJSON_GetArraySize(files) != m->ranks)
        return problem_set(why, damaged, "%s does not name %lld files, one for each rank", name,
                           (long long)m->ranks);
    manifest_file *file = got(calloc((size_t)m->ranks, sizeof *file));
    m->file = file;
    const cJSON *item = files->child;
    for (int64_t rank = 0; rank < m->ranks; rank++, item = item->next) {
        char expected[MANIFEST_FILE_NAME];
        manifest_file_name(rank, expected);
        if (!text_is(cJSON_GetObjectItemCaseSensitive(item, "name"), expected) ||
            !whole(cJSON_GetObjectItemCaseSensitive(item, "bytes"), 0, max_number, &file[rank].bytes) ||
            !read_hash(cJSON_GetObjectItemCaseSensitive(item, "xxh64"), &file[rank].hash))
            return problem_set(why, damaged, "%s: file %lld is not %s with size and hash", name,
                               (long long)rank, expected);
    }
    return true;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const manifest_option *)a)->name, ((const manifest_option *)b)->name);
}

static bool read_options(manifest *m, const cJSON *options, const char *name, problem *why) {
    if (!cJSON_IsObject(options)) return problem_set(why, damaged, "%s has no options", name);
    manifest_option *option = got(calloc((size_t)cJSON_GetArraySize(options) + 1, sizeof *option));
    m->option = option;
    const cJSON *item;
    cJSON_ArrayForEach(item, options) {
        if (!cJSON_IsString(item))
            return problem_set(why, damaged, "%s: option %.100s is not a text", name, item->string);
        manifest_option *o = &option[m->options++];
        o->name = got(strdup(item->string));
        o->value = got(strdup(item->valuestring));
    }
    qsort(option, (size_t)m->options, sizeof *option, by_name);
    for (int64_t i = 1; i < m->options; i++)
        if (by_name(&option[i - 1], &option[i]) == 0)
            return problem_set(why, damaged, "%s: option %.100s is there twice", name, option[i].name);
    return true;
}

static bool read_root(manifest *m, const cJSON *root, const char *name, problem *why) {
    int64_t version;
    if (!cJSON_IsObject(root) || !text_is(cJSON_GetObjectItemCaseSensitive(root, "format"), format))
        return problem_set(why, NULL, "%s is not the manifest of a checkpoint", name);
    if (!whole(cJSON_GetObjectItemCaseSensitive(root, "version"), 0, max_number, &version))
        return problem_set(why, damaged, "%s has no version", name);
    if (version != VERSION)
        return problem_set(why, "it was written by another version of this program",
                           "%s has version %lld, expected %d", name, (long long)version, VERSION);
    if (!whole(cJSON_GetObjectItemCaseSensitive(root, "step"), 0, max_number, &m->step))
        return problem_set(why, damaged, "%s has no step", name);
    if (!whole(cJSON_GetObjectItemCaseSensitive(root, "ranks"), 1, MANIFEST_MAX_RANKS, &m->ranks))
        return problem_set(why, damaged, "%s has no number of ranks from 1 to %d", name, MANIFEST_MAX_RANKS);
    return read_options(m, cJSON_GetObjectItemCaseSensitive(root, "options"), name, why) &&
           read_files(m, cJSON_GetObjectItemCaseSensitive(root, "files"), name, why);
}

manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why) {
    if (size < 1 || size > MANIFEST_MAX_BYTES || memchr(text, 0, (size_t)size) || !sealed(text, size)) {
        problem_set(why, damaged, "%s is damaged: it does not end in the hash of what it says", name);
        return NULL;
    }
    char *copy = got(malloc((size_t)size + 1)); // with a terminator
    memcpy(copy, text, (size_t)size);
    copy[size] = 0;
    cJSON *root = cJSON_ParseWithOpts(copy, NULL, true);
    free(copy);
    manifest *m = got(calloc(1, sizeof *m));
    bool sound = read_root(m, root, name, why);
    cJSON_Delete(root);
    if (sound) return m;
    manifest_free(m);
    return NULL;
}

void manifest_free(manifest *m) {
    if (!m) return;
    for (int64_t i = 0; i < m->options; i++) {
        free((char *)m->option[i].name);
        free((char *)m->option[i].value);
    }
    free((manifest_option *)m->option);
    free((manifest_file *)m->file);
    free(m);
}
