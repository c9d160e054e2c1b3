// See agreement.h. Versions first: another one may have another table, whose rows cannot be compared.
#include "agreement.h"
#include "../commfuse/die.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { SHOWN = 56 };

typedef struct fact { // a text, however long
    uint64_t hash;
    char begin[SHOWN];
} fact;

static const char *const of_a_host[] = {"threads", "train", "val", "init-from", "log", NULL};

static bool may_differ(const char *name) {
    for (const char *const *own = of_a_host; *own; own++)
        if (strcmp(*own, name) == 0) return true;
    return false;
}

static fact fact_of(const char *text) {
    fact f = {.hash = XXH64(text, strlen(text), 0)};
    snprintf(f.begin, sizeof f.begin, "%.*s", SHOWN - 1, text);
    return f;
}

// (ranks, count) facts of all ranks.
static fact *gather_facts(const fact *mine, int count, int ranks, agreement_gather *gather, void *argument) {
    int64_t bytes = count * (int64_t)sizeof *mine;
    fact *all = calloc((size_t)ranks, (size_t)bytes);
    if (!all) cf_die(NULL, "out of memory for the options of %d ranks", ranks);
    gather(argument, mine, all, bytes);
    return all;
}

static void compare_versions(const char *version, int ranks, agreement_gather *gather, void *argument) {
    fact mine = fact_of(version), *all = gather_facts(&mine, 1, ranks, gather, argument);
    for (int rank = 1; rank < ranks; rank++)
        if (all[rank].hash != all[0].hash)
            cf_die_together("copy one program to every host, or build it there from the same sources",
                            "rank %d runs version %s of this program, rank 0 version %s", rank,
                            all[rank].begin, all[0].begin);
    free(all);
}

static void take_facts(const options *o, const option_row *table, int rows, fact *mine) {
    char text[PATH_MAX];
    for (int i = 0; i < rows; i++) {
        options_value(o, &table[i], text, sizeof text);
        mine[i] = fact_of(may_differ(table[i].name) ? "" : text);
    }
}

void agreement_check(const options *o, const char *version, int ranks, agreement_gather *gather,
                     void *argument) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    fact mine[64]; // options.given has one bit a row
    compare_versions(version, ranks, gather, argument);
    take_facts(o, table, rows, mine);
    fact *all = gather_facts(mine, rows, ranks, gather, argument);
    for (int rank = 1; rank < ranks; rank++)
        for (int i = 0; i < rows; i++) {
            const fact *theirs = &all[(int64_t)rank * rows + i];
            if (theirs->hash != all[i].hash)
                cf_die_together("start every rank with the same options; some launchers take them per host",
                                "rank %d was started with --%s '%s', rank 0 with '%s'", rank, table[i].name,
                                theirs->begin, all[i].begin);
        }
    free(all);
}
