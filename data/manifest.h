// What a checkpoint says of itself, manifest.json: its step, one file per rank with size and XXH64, and texts
// that are the program's business (mesh, hyper-parameters, position in the data).
//
//   { "format": "commfuse checkpoint", "version": 1, "step": 123, "ranks": 2,
//     "options": {"tp": "2", …},
//     "files": [{"name": "rank_00000.safetensors", "bytes": 4096, "xxh64": "0123456789abcdef"}, …],
//     "xxh64": "…" }            over all of the text above the line that holds it
//
// The manifest is written last, so that its being there and true to its own hash means that all the rest was
// written before.
#ifndef MANIFEST_H
#define MANIFEST_H

#include "problem.h"
#include <stdint.h>

CF_EXTERN_C_BEGIN

enum { MANIFEST_FILE_NAME = 48, MANIFEST_MAX_RANKS = 1 << 16, MANIFEST_MAX_BYTES = 1 << 24, MANIFEST_MAX_OPTIONS = 1024 };

typedef struct manifest_file {
    int64_t bytes;
    uint64_t hash; // XXH64, seed 0
} manifest_file;

typedef struct manifest {
    int64_t step, ranks;
    manifest_file *file;   // (ranks)
    struct cJSON *options; // texts by their names, none twice
} manifest;

void manifest_file_name(int64_t rank, char name[MANIFEST_FILE_NAME]); // "rank_00007.safetensors"

struct cJSON *manifest_options(void); // none yet; given back by cJSON_Delete()
void manifest_add_option(struct cJSON *options, const char *name, const char *value);
const char *manifest_value(const manifest *m, const char *name); // of an option; NULL: there is none

char *manifest_print(const manifest *m, int64_t *size); // the text; the caller frees it
// NULL: the text is no sound manifest, see why; `name` says whose it is. Else manifest_free() it.
manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why);
void manifest_free(manifest *m);

CF_EXTERN_C_END
#endif
