// See ledger.h and fuzz.h. The memory is the sanitizer's own malloc, so its bounds are watched as ever.
#define LEDGER_ITSELF
#include "tests/fuzz/ledger.h"
#include "tests/fuzz/fuzz.h"

typedef enum { MEMORY, MAP, DESCRIPTOR, NAMES } kind;

typedef struct entry {
    kind kind;
    void *what; // MEMORY, MAP, NAMES
    size_t size;
    int fd;
    glob_t names;
} entry;

static entry ledger[256];
static int entries;

static entry *enter(kind k, void *what) {
    FUZZ_CHECK(entries < (int)(sizeof ledger / sizeof *ledger));
    ledger[entries] = (entry){.kind = k, .what = what};
    return &ledger[entries++];
}

static entry *find(kind k, const void *what, int fd) {
    for (entry *e = ledger; e < ledger + entries; e++)
        if (e->kind == k && e->what == what && e->fd == fd) return e;
    fprintf(stderr, "given back what was not taken\n");
    abort();
}

static void strike(entry *e) {
    *e = ledger[--entries];
}

void *ledger_malloc(size_t size) {
    void *memory = malloc(size);
    if (memory) enter(MEMORY, memory);
    return memory;
}
void *ledger_calloc(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (memory) enter(MEMORY, memory);
    return memory;
}
char *ledger_strdup(const char *text) {
    char *copy = strdup(text);
    if (copy) enter(MEMORY, copy);
    return copy;
}
void ledger_free(void *memory) {
    if (memory) strike(find(MEMORY, memory, 0));
    free(memory);
}

void *ledger_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    void *map = mmap(address, size, protection, flags, fd, offset);
    if (map != MAP_FAILED) enter(MAP, map)->size = size;
    return map;
}
int ledger_munmap(void *map, size_t size) {
    entry *e = find(MAP, map, 0);
    FUZZ_CHECK(e->size == size);
    strike(e);
    return munmap(map, size);
}

int ledger_open(const char *path, int flags, ...) {
    int fd = open(path, flags, 0600);
    if (fd >= 0) enter(DESCRIPTOR, NULL)->fd = fd;
    return fd;
}
int ledger_close(int fd) {
    strike(find(DESCRIPTOR, NULL, fd));
    return close(fd);
}

int ledger_glob(const char *pattern, int flags, int (*error)(const char *path, int number), glob_t *found) {
    int status = glob(pattern, flags, error, found);
    if (status == 0) enter(NAMES, found->gl_pathv)->names = *found;
    return status;
}
void ledger_globfree(glob_t *found) {
    strike(find(NAMES, found->gl_pathv, 0));
    globfree(found);
}

static void give_back(entry *e) {
    if (e->kind == MEMORY) free(e->what);
    if (e->kind == MAP) munmap(e->what, e->size);
    if (e->kind == DESCRIPTOR) close(e->fd);
    if (e->kind == NAMES) globfree(&e->names);
}

void ledger_settle(bool died) {
    FUZZ_CHECK(died || entries == 0);
    while (entries > 0) give_back(&ledger[--entries]);
}
