// See manifest.h. The line with the manifest's own hash is always the last and always of the same form, so it
// is compared as text: there is one right ending for a given text above it, and any other is damage. Only
// then is the rest parsed, and it is still believed nothing: a manifest may be sealed and wrong, written by
// another program.
#include "manifest.h"
#include "json.h"
#include <inttypes.h>
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { VERSION = 1, SEAL_ROOM = 40 };
static const char format[] = "commfuse checkpoint";

// The last line, which ends the text above it.
static int64_t make_seal(const char *text, int64_t size, char seal[SEAL_ROOM]) {
    return snprintf(seal, SEAL_ROOM, "\t\"xxh64\":\t\"%016" PRIx64 "\"\n}\n", (uint64_t)XXH64(text, (size_t)size, 0));
}

void manifest_file_name(int64_t rank, char name[MANIFEST_FILE_NAME]) {
    snprintf(name, MANIFEST_FILE_NAME, "rank_%05lld.safetensors", (long long)rank);
}

// cJSON returns NULL for want of memory, and takes NULL for an object; so looking once at the end is not
// enough.
static void *got(void *item) {
    if (!item) cf_die(NULL, "out of memory for a checkpoint's manifest");
    return item;
}

cJSON *manifest_options(void) {
    return got(cJSON_CreateObject());
}

void manifest_add_option(cJSON *options, const char *name, const char *value) {
    if (json_text(options, name)) cf_die(NULL, "a checkpoint's option %s is there twice", name);
    got(cJSON_AddStringToObject(options, name, value));
}

const char *manifest_value(const manifest *m, const char *name) {
    return json_text(m->options, name);
}

char *manifest_print(const manifest *m, int64_t *size) {
    if (m->ranks < 1 || m->ranks > MANIFEST_MAX_RANKS || m->step < 0 || m->step > JSON_WHOLE_MAX)
        cf_die(NULL, "no manifest for step %lld of %lld ranks", (long long)m->step, (long long)m->ranks);
    cJSON *root = got(cJSON_CreateObject());
    got(cJSON_AddStringToObject(root, "format", format));
    got(cJSON_AddNumberToObject(root, "version", VERSION));
    got(cJSON_AddNumberToObject(root, "step", (double)m->step));
    got(cJSON_AddNumberToObject(root, "ranks", (double)m->ranks));
    if (!cJSON_AddItemReferenceToObject(root, "options", m->options)) got(NULL);
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
    char *body = got(cJSON_Print(root)), seal[SEAL_ROOM];
    cJSON_Delete(root);
    size_t length = strlen(body); // whose last two bytes are "\n}": ",\n" takes their place
    char *text = got(realloc(body, length + SEAL_ROOM));
    memcpy(text + length - 2, ",\n", 2);
    *size = (int64_t)length + make_seal(text, (int64_t)length, seal);
    strcpy(text + length, seal);
    return text;
}

// --- reading -----------------------------------------------------------------------------------------------

static const char damaged[] = "the checkpoint is damaged, or was not copied completely";

static bool sealed(const char *text, int64_t size) {
    char seal[SEAL_ROOM];
    int64_t length = make_seal(text, 0, seal), above = size - length; // its length is always the same
    if (above < 0) return false;
    make_seal(text, above, seal);
    return memcmp(text + above, seal, (size_t)length) == 0;
}

static bool read_file(const cJSON *item, int64_t rank, manifest_file *file) {
    char name[MANIFEST_FILE_NAME], again[17];
    const char *hash = json_text(item, "xxh64");
    file->hash = hash ? strtoull(hash, NULL, 16) : 0;
    manifest_file_name(rank, name);
    snprintf(again, sizeof again, "%016" PRIx64, file->hash);
    return json_is(item, "name", name) && json_whole(item, "bytes", 0, JSON_WHOLE_MAX, &file->bytes) &&
           json_is(item, "xxh64", again);
}

static bool read_files(manifest *m, const cJSON *files, const char *name, problem *why) {
    if (!cJSON_IsArray(files) || cJSON_GetArraySize(files) != m->ranks)
        return problem_set(why, damaged, "%s does not name %lld files, one for each rank", name, (long long)m->ranks);
    m->file = got(calloc((size_t)m->ranks, sizeof *m->file));
    int64_t rank = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, files) {
        if (!read_file(item, rank, &m->file[rank]))
            return problem_set(why, damaged, "%s: file %lld is not rank_%05lld.safetensors with size and hash", name,
                               (long long)rank, (long long)rank);
        rank++;
    }
    return true;
}

static bool check_options(const cJSON *options, const char *name, problem *why) {
    if (!cJSON_IsObject(options)) return problem_set(why, damaged, "%s has no options", name);
    if (cJSON_GetArraySize(options) > MANIFEST_MAX_OPTIONS)
        return problem_set(why, damaged, "%s has more than %d options", name, MANIFEST_MAX_OPTIONS);
    const cJSON *item;
    cJSON_ArrayForEach(item, options) {
        if (!cJSON_IsString(item)) return problem_set(why, damaged, "%s: option %.100s is not a text", name, item->string);
        if (cJSON_GetObjectItemCaseSensitive(options, item->string) != item) // but the first of that name
            return problem_set(why, damaged, "%s: option %.100s is there twice", name, item->string);
    }
    return true;
}

static bool read_root(manifest *m, cJSON *root, const char *name, problem *why) {
    int64_t version;
    if (!json_is(root, "format", format)) return problem_set(why, NULL, "%s is not the manifest of a checkpoint", name);
    if (!json_whole(root, "version", 0, JSON_WHOLE_MAX, &version)) return problem_set(why, damaged, "%s has no version", name);
    if (version != VERSION)
        return problem_set(why, "it was written by another version of this program", "%s has version %lld, expected %d", name,
                           (long long)version, VERSION);
    if (!json_whole(root, "step", 0, JSON_WHOLE_MAX, &m->step)) return problem_set(why, damaged, "%s has no step", name);
    if (!json_whole(root, "ranks", 1, MANIFEST_MAX_RANKS, &m->ranks))
        return problem_set(why, damaged, "%s has no number of ranks from 1 to %d", name, MANIFEST_MAX_RANKS);
    m->options = cJSON_DetachItemFromObjectCaseSensitive(root, "options");
    return check_options(m->options, name, why) && read_files(m, cJSON_GetObjectItemCaseSensitive(root, "files"), name, why);
}

manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why) {
    if (size < 1 || size > MANIFEST_MAX_BYTES || memchr(text, 0, (size_t)size) || !sealed(text, size)) {
        problem_set(why, damaged, "%s is damaged: it does not end in the hash of what it says", name);
        return NULL;
    }
    char *copy = got(strndup(text, (size_t)size)); // with a terminator
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
    cJSON_Delete(m->options);
    free(m->file);
    free(m);
}
