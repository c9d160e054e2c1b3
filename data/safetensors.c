// See safetensors.h. Reading trusts nothing in this order: the header's length lies inside the file; the
// header is one JSON object and no byte more; each entry has its three fields, once each and of the right
// kind; numbers are whole and of at most fifteen digits, which cJSON's doubles keep and its printing too; a
// shape's product does not overflow and is as long as its offsets say; and, sorted by offset, the tensors
// fill the data from the first byte to the last. After that every pointer handed out is inside the map. A
// file that someone truncates meanwhile is SIGBUS; checkpoints are renamed into place and never written
// again, so nobody does.
//
// The header is padded until the data start at a multiple of 64 bytes, so tensors are aligned as their types
// need if larger types come first; a file whose elements lie askew is refused, as a pointer to them could not
// be used.
#include "safetensors.h"
#include "durable.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LENGTH_BYTES = 8, ALIGNMENT = 64, MAX_HEADER_BYTES = 1 << 24, BUFFER_BYTES = 1 << 20 };
static const int64_t max_number = INT64_C(999999999999999);
static const char metadata[] = "__metadata__";

typedef struct placed_tensor {
    tensor_entry entry; // its name belongs to the JSON below
    int64_t begin, end; // bytes, from the start of the data
} placed_tensor;

struct safetensors {
    char *map; // (bytes)
    int64_t bytes;
    const char *data;
    cJSON *header;
    int64_t count;
    placed_tensor *tensors;        // (count) by offset
    const placed_tensor **by_name; // (count)
};

struct safetensors_writer {
    durable_file file;
    bool failed;
    problem why;      // if it has failed
    int64_t appended; // bytes so far, the header included
    XXH64_state_t hash;
    int64_t buffered;
    char buffer[BUFFER_BYTES];
};

// --- entries -----------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    int bytes;
} types[TENSOR_TYPES] = {{"F64", 8}, {"I64", 8}, {"F32", 4}, {"BF16", 2}, {"U8", 1}};

int64_t tensor_type_bytes(tensor_type type) {
    return types[type].bytes;
}
const char *tensor_type_name(tensor_type type) {
    return types[type].name;
}

int64_t tensor_entry_bytes(const tensor_entry *entry) {
    int64_t bytes = tensor_type_bytes(entry->type);
    if (entry->dimensions < 0 || entry->dimensions > SAFETENSORS_DIMENSIONS) return -1;
    for (int i = 0; i < entry->dimensions; i++)
        if (entry->shape[i] < 0 || __builtin_mul_overflow(bytes, entry->shape[i], &bytes)) return -1;
    return bytes <= max_number ? bytes : -1;
}

// --- reading: the header -----------------------------------------------------------------------------------

static const char damaged[] = "it is damaged, or was not copied completely";

// A whole number from 0 to max_number.
static bool whole(const cJSON *item, int64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= (double)max_number))
        return false;
    *value = (int64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

static bool read_type(const cJSON *item, tensor_type *type) {
    if (!cJSON_IsString(item)) return false;
    for (int i = 0; i < TENSOR_TYPES; i++)
        if (strcmp(item->valuestring, types[i].name) == 0) {
            *type = (tensor_type)i;
            return true;
        }
    return false;
}

static bool read_shape(const cJSON *item, tensor_entry *entry) {
    if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) > SAFETENSORS_DIMENSIONS) return false;
    const cJSON *extent;
    cJSON_ArrayForEach(extent, item) if (!whole(extent, &entry->shape[entry->dimensions++])) return false;
    return true;
}

static bool read_offsets(const cJSON *item, placed_tensor *tensor) {
    return cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2 && whole(item->child, &tensor->begin) &&
           whole(item->child->next, &tensor->end);
}

static bool read_tensor(const safetensors *f, const char *path, const cJSON *item, placed_tensor *tensor,
                        problem *why) {
    const char *name = item->string;
    int64_t size = f->bytes - (f->data - f->map);
    *tensor = (placed_tensor){.entry = {.name = name}};
    if (!*name) return problem_set(why, damaged, "%s: a tensor has no name", path);
    if (!cJSON_IsObject(item) || cJSON_GetArraySize(item) != 3)
        return problem_set(why, damaged,
                           "%s: tensor %.100s is not described by dtype, shape and data_offsets", path, name);
    if (!read_type(cJSON_GetObjectItemCaseSensitive(item, "dtype"), &tensor->entry.type))
        return problem_set(why, damaged, "%s: tensor %.100s: dtype is not one of F64, I64, F32, BF16, U8",
                           path, name);
    if (!read_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), &tensor->entry))
        return problem_set(why, damaged, "%s: tensor %.100s: shape is not up to %d whole numbers", path, name,
                           SAFETENSORS_DIMENSIONS);
    if (!read_offsets(cJSON_GetObjectItemCaseSensitive(item, "data_offsets"), tensor))
        return problem_set(why, damaged, "%s: tensor %.100s: data_offsets is not two whole numbers", path,
                           name);
    if (tensor->begin > tensor->end || tensor->end > size)
        return problem_set(why, damaged, "%s: tensor %.100s: data_offsets %lld to %lld in %lld bytes of data",
                           path, name, (long long)tensor->begin, (long long)tensor->end, (long long)size);
    int64_t bytes = tensor_entry_bytes(&tensor->entry);
    if (bytes != tensor->end - tensor->begin)
        return problem_set(why, damaged,
                           "%s: tensor %.100s: its shape needs %lld bytes, data_offsets give %lld", path,
                           name, (long long)bytes, (long long)(tensor->end - tensor->begin));
    if ((f->data - f->map + tensor->begin) % tensor_type_bytes(tensor->entry.type) != 0)
        return problem_set(why, "write it with larger element types first",
                           "%s: tensor %.100s is not aligned to its %s elements", path, name,
                           tensor_type_name(tensor->entry.type));
    return true;
}

static bool read_metadata(const char *path, const cJSON *item, problem *why) {
    const cJSON *text;
    bool texts = cJSON_IsObject(item);
    if (texts) cJSON_ArrayForEach(text, item) texts = texts && cJSON_IsString(text);
    return texts || problem_set(why, damaged, "%s: %s is not an object of texts", path, metadata);
}

// Empty tensors before the one that begins where they do.
static int by_offset(const void *a, const void *b) {
    const placed_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return strcmp(x->entry.name, y->entry.name);
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const placed_tensor *const *)a)->entry.name,
                  (*(const placed_tensor *const *)b)->entry.name);
}

static bool check_layout(safetensors *f, const char *path, problem *why) {
    int64_t at = 0, size = f->bytes - (f->data - f->map);
    qsort(f->tensors, (size_t)f->count, sizeof *f->tensors, by_offset);
    for (int64_t i = 0; i < f->count; i++) {
        const placed_tensor *t = &f->tensors[i];
        if (t->begin != at)
            return problem_set(why, damaged,
                               "%s: tensor %.100s begins at byte %lld, %s the end of the one before, %lld",
                               path, t->entry.name, (long long)t->begin, t->begin < at ? "before" : "behind",
                               (long long)at);
        at = t->end;
        f->by_name[i] = t;
    }
    if (at != size)
        return problem_set(why, damaged, "%s: its tensors end at byte %lld of %lld bytes of data", path,
                           (long long)at, (long long)size);
    qsort(f->by_name, (size_t)f->count, sizeof *f->by_name, by_name);
    for (int64_t i = 1; i < f->count; i++)
        if (by_name(&f->by_name[i - 1], &f->by_name[i]) == 0)
            return problem_set(why, damaged, "%s: tensor %.100s is there twice", path,
                               f->by_name[i]->entry.name);
    return true;
}

// The JSON text of the header, `length` bytes, which must be one object and nothing else.
static cJSON *parse_header(const char *text, int64_t length) {
    if (memchr(text, 0, (size_t)length) || *text != '{') return NULL;
    char *copy = malloc((size_t)length + 1); // with a terminator, which some versions of cJSON look for
    if (!copy) cf_die(NULL, "no memory for %lld bytes of a safetensors header", (long long)length);
    memcpy(copy, text, (size_t)length);
    copy[length] = 0;
    cJSON *header = cJSON_ParseWithOpts(copy, NULL, true);
    free(copy);
    return header;
}

static bool read_header(safetensors *f, const char *path, problem *why) {
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0 && f->bytes >= LENGTH_BYTES; i--)
        length = length << 8 | (unsigned char)f->map[i]; // NOLINT: not empty, so it is mapped
    if (length < 2 || length > MAX_HEADER_BYTES || (int64_t)length > f->bytes - LENGTH_BYTES)
        return problem_set(why, damaged,
                           "%s is no safetensors file: %lld bytes, of which the header takes %llu", path,
                           (long long)f->bytes, (unsigned long long)length);
    f->data = f->map + LENGTH_BYTES + length;
    f->header = parse_header(f->map + LENGTH_BYTES, (int64_t)length);
    if (!f->header) return problem_set(why, damaged, "%s: its header is not one JSON object", path);

    int64_t entries = cJSON_GetArraySize(f->header);
    f->tensors = calloc((size_t)entries + 1, sizeof *f->tensors);
    f->by_name = calloc((size_t)entries + 1, sizeof *f->by_name);
    if (!f->tensors || !f->by_name)
        cf_die(NULL, "no memory for the %lld tensors of %s", (long long)entries, path);
    const cJSON *item;
    cJSON_ArrayForEach(item, f->header) {
        bool sound = strcmp(item->string, metadata) == 0
                         ? read_metadata(path, item, why)
                         : read_tensor(f, path, item, &f->tensors[f->count++], why);
        if (!sound) return false;
    }
    return check_layout(f, path, why);
}

// --- reading: the file -------------------------------------------------------------------------------------

static bool map_file(safetensors *f, const char *path, problem *why) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe is refused, not waited for
    if (fd < 0) return durable_problem(why, "cannot open", path, -1);
    bool sound = fstat(fd, &status) == 0 || durable_problem(why, "cannot look at", path, -1);
    if (sound && !S_ISREG(status.st_mode)) sound = problem_set(why, NULL, "%s is not a regular file", path);
    if (sound && status.st_size == 0) sound = problem_set(why, damaged, "%s is empty", path);
    if (sound) {
        f->map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (f->map == MAP_FAILED) {
            f->map = NULL;
            sound = durable_problem(why, "cannot map", path, -1);
        }
        f->bytes = status.st_size;
    }
    close(fd);
    return sound;
}

safetensors *safetensors_open(const char *path, problem *why) {
    safetensors *f = calloc(1, sizeof *f);
    if (!f) cf_die(NULL, "out of memory for %s", path);
    if (map_file(f, path, why) && read_header(f, path, why)) return f;
    safetensors_close(f);
    return NULL;
}

void safetensors_close(safetensors *f) {
    if (!f) return;
    if (f->map) munmap(f->map, (size_t)f->bytes);
    cJSON_Delete(f->header);
    free(f->tensors);
    free(f->by_name);
    free(f);
}

int64_t safetensors_count(const safetensors *f) {
    return f->count;
}

const tensor_entry *safetensors_entry(const safetensors *f, int64_t i) {
    if (i < 0 || i >= f->count) cf_die(NULL, "tensor %lld of %lld", (long long)i, (long long)f->count);
    return &f->tensors[i].entry;
}

int64_t safetensors_find(const safetensors *f, const char *name) {
    int64_t low = 0, high = f->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(f->by_name[middle]->entry.name, name);
        if (order == 0) return f->by_name[middle] - f->tensors;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}

const void *safetensors_data(const safetensors *f, int64_t i) {
    safetensors_entry(f, i);
    return f->data + f->tensors[i].begin;
}

// --- writing -----------------------------------------------------------------------------------------------

static void add_entry(cJSON *header, const char *path, const tensor_entry *entry, int64_t *offset) {
    int64_t bytes = tensor_entry_bytes(entry), begin = *offset;
    if (bytes < 0 || __builtin_add_overflow(begin, bytes, offset) || *offset > max_number)
        cf_die(NULL, "%s: tensor %s has no size that a file can hold", path, entry->name);
    if (!*entry->name || strcmp(entry->name, metadata) == 0)
        cf_die(NULL, "%s: no tensor may be called '%s'", path, entry->name);
    if (begin % tensor_type_bytes(entry->type) != 0)
        cf_die("put tensors of larger elements first",
               "%s: tensor %s would not be aligned to its %s elements", path, entry->name,
               tensor_type_name(entry->type));
    double offsets[2] = {(double)begin, (double)*offset}, shape[SAFETENSORS_DIMENSIONS];
    for (int i = 0; i < entry->dimensions; i++) shape[i] = (double)entry->shape[i];
    cJSON *item = cJSON_AddObjectToObject(header, entry->name);
    if (!item || !cJSON_AddStringToObject(item, "dtype", tensor_type_name(entry->type)) ||
        !cJSON_AddItemToObject(item, "shape", cJSON_CreateDoubleArray(shape, entry->dimensions)) ||
        !cJSON_AddItemToObject(item, "data_offsets", cJSON_CreateDoubleArray(offsets, 2)))
        cf_die(NULL, "out of memory for the header of %s", path);
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void check_names(const char *path, const tensor_entry *entries, int64_t count) {
    const char **names = malloc((size_t)(count + 1) * sizeof *names);
    if (!names) cf_die(NULL, "out of memory for the %lld tensors of %s", (long long)count, path);
    for (int64_t i = 0; i < count; i++) names[i] = entries[i].name;
    qsort(names, (size_t)count, sizeof *names, by_text);
    for (int64_t i = 1; i < count; i++)
        if (strcmp(names[i - 1], names[i]) == 0) cf_die(NULL, "%s: tensor %s is there twice", path, names[i]);
    free(names);
}

// The header with its length in front and its padding behind; and how long the whole file will be.
static char *make_header(const char *path, const tensor_entry *entries, int64_t count, int64_t *length,
                         int64_t *file_bytes) {
    int64_t data = 0;
    check_names(path, entries, count);
    cJSON *header = cJSON_CreateObject();
    for (int64_t i = 0; i < count; i++) add_entry(header, path, &entries[i], &data);
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    int64_t used = text ? (int64_t)strlen(text) : 0,
            padding = ALIGNMENT - 1 - (LENGTH_BYTES + used - 1) % ALIGNMENT;
    if (used + padding > MAX_HEADER_BYTES)
        cf_die(NULL, "%s: %lld tensors need a header of more than %d bytes", path, (long long)count,
               MAX_HEADER_BYTES);
    *length = LENGTH_BYTES + used + padding;
    *file_bytes = *length + data;
    char *bytes = malloc((size_t)*length);
    if (!text || !bytes) cf_die(NULL, "out of memory for the header of %s", path);
    for (int i = 0; i < LENGTH_BYTES; i++) bytes[i] = (char)((uint64_t)(used + padding) >> 8 * i);
    memcpy(bytes + LENGTH_BYTES, text, (size_t)used);
    memset(bytes + LENGTH_BYTES + used, ' ', (size_t)padding);
    free(text);
    return bytes;
}

// The first failure is the one that is told; after it nothing more is written.
static void flush(safetensors_writer *w) {
    XXH64_update(&w->hash, w->buffer, (size_t)w->buffered);
    if (!w->failed) w->failed = !durable_append(&w->file, w->buffer, w->buffered, &w->why);
    w->buffered = 0;
}

safetensors_writer *safetensors_create(const char *path, const tensor_entry *entries, int64_t count) {
    safetensors_writer *w = calloc(1, sizeof *w);
    if (!w) cf_die(NULL, "out of memory for writing %s", path);
    XXH64_reset(&w->hash, 0);
    int64_t header_bytes, bytes;
    char *header = make_header(path, entries, count, &header_bytes, &bytes);
    w->failed = !durable_create(&w->file, path, bytes, &w->why);
    safetensors_append(w, header, header_bytes);
    free(header);
    return w;
}

void safetensors_append(safetensors_writer *w, const void *bytes, int64_t count) {
    if (count < 0 || count > w->file.bytes - w->appended) {
        durable_abandon(&w->file);
        cf_die(NULL, "%s: %lld bytes appended to %lld of %lld", w->file.path, (long long)count,
               (long long)w->appended, (long long)w->file.bytes);
    }
    w->appended += count;
    for (const char *from = bytes; count > 0;) {
        int64_t room = BUFFER_BYTES - w->buffered, n = count < room ? count : room;
        memcpy(w->buffer + w->buffered, from, (size_t)n);
        w->buffered += n;
        from += n;
        count -= n;
        if (w->buffered == BUFFER_BYTES) flush(w);
    }
}

void safetensors_abandon(safetensors_writer *w) {
    if (!w) return;
    durable_abandon(&w->file);
    free(w);
}

bool safetensors_commit(safetensors_writer *w, int64_t *bytes, uint64_t *hash, problem *why) {
    if (w->appended != w->file.bytes) {
        durable_abandon(&w->file);
        cf_die(NULL, "%s is incomplete: %lld of %lld bytes appended", w->file.path, (long long)w->appended,
               (long long)w->file.bytes);
    }
    flush(w);
    *bytes = w->file.bytes;
    *hash = XXH64_digest(&w->hash);
    bool done = !w->failed && durable_commit(&w->file, &w->why);
    if (!done) *why = w->why;
    safetensors_abandon(w); // only frees it, if it is done
    return done;
}
