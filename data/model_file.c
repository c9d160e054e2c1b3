// See model_file.h. Reading maps the file; tensors are converted to float as they are asked for, so a rank
// that holds a shard touches only its part of the file. The shape's limits are checked first and are small
// enough that no product of them leaves 64 bits; only then is the file's size compared with what the header
// promises, exactly; after that every offset is inside the map.
//
// Writing goes through one buffer to a file that appears whole (durable.h): a reader sees the old one or the new
// one, whatever happens in between. Any failure removes the temporary file before it dies.
#include "model_file.h"
#include "durable.h"
#include "regular.h"
#include "../commfuse/bf16.h"
#include "../commfuse/die.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MAGIC = 20240326, VERSION_FP32 = 3, VERSION_BF16 = 5, HEADER = 256, BUFFER_BYTES = 1 << 20 };
enum { HEADER_BYTES = HEADER * (int)sizeof(int32_t) };

// The largest model that a file may describe; Vp · C and 4 · C² · L stay below 2^52.
enum { MAX_T = 1 << 24, MAX_V = 1 << 24, MAX_L = 1 << 12, MAX_C = 1 << 17 };

struct model_file {
    void *map;
    int64_t bytes; // of the map
    model_shape shape;
    bool bf16;
    int64_t first[MODEL_TENSORS]; // element number of each tensor's first element
};

struct model_writer {
    durable_file file;
    bool bf16;
    int64_t elements, expected; // appended so far, in a complete file
    int64_t buffered;           // bytes in the buffer
    char buffer[BUFFER_BYTES];
};

// --- shape -------------------------------------------------------------------------------------------------

const char *model_tensor_name(int tensor) {
    static const char *const name[MODEL_TENSORS] = {"wte",      "wpe",      "ln1w", "ln1b", "qkvw", "qkvb",
                                                    "attprojw", "attprojb", "ln2w", "ln2b", "fcw",  "fcb",
                                                    "fcprojw",  "fcprojb",  "lnfw", "lnfb"};
    return name[tensor];
}

int64_t model_tensor_layers(const model_shape *shape, int tensor) {
    switch (tensor) {
    case MODEL_WTE:
    case MODEL_WPE:
    case MODEL_LNFW:
    case MODEL_LNFB:
        return 1;
    default:
        return shape->L;
    }
}

int64_t model_tensor_rows(const model_shape *shape, int tensor) {
    switch (tensor) {
    case MODEL_WTE:
        return shape->Vp;
    case MODEL_WPE:
        return shape->maxT;
    case MODEL_QKVW:
        return 3 * shape->C;
    case MODEL_ATTPROJW:
        return shape->C;
    case MODEL_FCW:
        return 4 * shape->C;
    case MODEL_FCPROJW:
        return shape->C;
    default:
        return 1; // a vector
    }
}

int64_t model_tensor_columns(const model_shape *shape, int tensor) {
    switch (tensor) {
    case MODEL_QKVB:
        return 3 * shape->C;
    case MODEL_FCB:
    case MODEL_FCPROJW:
        return 4 * shape->C;
    default:
        return shape->C;
    }
}

static int64_t tensor_elements(const model_shape *shape, int tensor) {
    return model_tensor_layers(shape, tensor) * model_tensor_rows(shape, tensor) *
           model_tensor_columns(shape, tensor);
}

int64_t model_parameters(const model_shape *shape) {
    int64_t total = 0;
    for (int tensor = 0; tensor < MODEL_TENSORS; tensor++) total += tensor_elements(shape, tensor);
    return total;
}

static const char *const how_to_mend = "it is damaged or was not copied completely; make or copy it again";

void model_shape_check(const model_shape *s, const char *of, const char *path) {
    const struct {
        const char *name;
        int64_t value, maximum;
    } field[] = {{"maximum sequence length", s->maxT, MAX_T},
                 {"vocabulary", s->V, MAX_V},
                 {"layers", s->L, MAX_L},
                 {"heads", s->heads, MAX_C},
                 {"channels", s->C, MAX_C},
                 {"padded vocabulary", s->Vp, MAX_V}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (field[i].value < 1 || field[i].value > field[i].maximum)
            cf_die_together(how_to_mend, "%s %s: %s is %lld, allowed is 1 to %lld", of, path, field[i].name,
                            (long long)field[i].value, (long long)field[i].maximum);
    if (s->C % s->heads != 0)
        cf_die_together(how_to_mend, "%s %s: %lld channels cannot be split into %lld heads", of, path,
                        (long long)s->C, (long long)s->heads);
    if (s->Vp < s->V)
        cf_die_together(how_to_mend, "%s %s: padded vocabulary %lld is smaller than the vocabulary %lld", of,
                        path, (long long)s->Vp, (long long)s->V);
}

// --- reading -----------------------------------------------------------------------------------------------

static void map_file(model_file *file, const char *path) {
    static const char *const how_to_name =
        "--init-from FILE: every rank must be able to read it; llm.c's, or model.bin of a run's --out";
    struct stat status;
    const char *why;
    int fd = regular_open(path, &status, &why);
    if (fd < 0) cf_die_together(how_to_name, "model file %s cannot be opened: %s", path, why);
    if (status.st_size < HEADER_BYTES)
        cf_die_together(how_to_mend, "model file %s has %lld bytes, less than the %d of a header", path,
                        (long long)status.st_size, HEADER_BYTES);
    file->bytes = status.st_size;
    file->map = mmap(NULL, (size_t)file->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (file->map == MAP_FAILED)
        cf_die_together("copy it to a disk of this machine",
                        "model file %s, %lld bytes, cannot be mapped: %s", path, (long long)file->bytes,
                        strerror(errno));
    close(fd);
}

static void check_header(model_file *file, const char *path) {
    const int32_t *h = file->map;
    if (h[0] != MAGIC)
        cf_die_together("--init-from takes llm.c's model files: first number 20240326, version 3 or 5",
                        "%s is not a model file: its first number is %d, expected %d", path, h[0], MAGIC);
    if (h[1] != VERSION_FP32 && h[1] != VERSION_BF16)
        cf_die_together("write it anew with a current exporter: older versions have no padded vocabulary",
                        "model file %s has version %d, expected %d (fp32) or %d (bf16)", path, h[1],
                        VERSION_FP32, VERSION_BF16);
    file->bf16 = h[1] == VERSION_BF16;
    file->shape = (model_shape){.maxT = h[2], .V = h[3], .L = h[4], .heads = h[5], .C = h[6], .Vp = h[7]};
    model_shape_check(&file->shape, "model file", path);
    int64_t expected = HEADER_BYTES + model_parameters(&file->shape) * (file->bf16 ? 2 : 4);
    if (file->bytes != expected)
        cf_die_together(
            how_to_mend,
            "model file %s is %s: its header describes %lld parameters in %s, which is %lld bytes, "
            "but it has %lld",
            path, file->bytes < expected ? "truncated" : "too long",
            (long long)model_parameters(&file->shape), file->bf16 ? "bf16" : "fp32", (long long)expected,
            (long long)file->bytes);
}

model_file *model_file_open(const char *path) {
    model_file *file = calloc(1, sizeof *file);
    if (!file) cf_die(NULL, "out of memory for model file %s", path);
    map_file(file, path);
    check_header(file, path);
    for (int tensor = 1; tensor < MODEL_TENSORS; tensor++)
        file->first[tensor] = file->first[tensor - 1] + tensor_elements(&file->shape, tensor - 1);
    return file;
}

model_shape model_file_shape(const model_file *file) {
    return file->shape;
}

uint64_t model_file_fingerprint(const model_file *file, bool all) {
    if (all) return XXH64(file->map, (size_t)file->bytes, 0) >> 11;
    const int64_t pieces = 1250, bytes = 512, last = file->bytes - bytes; // a header alone is longer
    uint64_t print = (uint64_t)file->bytes;
    for (int64_t i = 0; i < pieces; i++)
        print = XXH64((const char *)file->map + last / (pieces - 1) * i, (size_t)bytes, print);
    return XXH64((const char *)file->map + last, (size_t)bytes, print) >> 11;
}

void model_file_read(const model_file *file, int tensor, int64_t layer, int64_t first, int64_t count,
                     float *out) {
    if (tensor < 0 || tensor >= MODEL_TENSORS) cf_die(NULL, "model file: there is no tensor %d", tensor);
    int64_t layers = model_tensor_layers(&file->shape, tensor);
    int64_t elements = tensor_elements(&file->shape, tensor) / layers; // of one layer
    if (layer < 0 || layer >= layers || first < 0 || count < 0 || first > elements ||
        count > elements - first)
        cf_die(NULL, "model file: %lld elements from %lld of %s, layer %lld; it has %lld layers of %lld",
               (long long)count, (long long)first, model_tensor_name(tensor), (long long)layer,
               (long long)layers, (long long)elements);
    const char *data = (const char *)file->map + HEADER_BYTES;
    int64_t from = file->first[tensor] + layer * elements + first;
    if (file->bf16) {
        const uint16_t *half = (const uint16_t *)data + from;
        for (int64_t i = 0; i < count; i++) out[i] = cf_float_of_bf16(half[i]);
    } else if (count > 0) {
        memcpy(out, (const float *)data + from, (size_t)count * sizeof *out);
    }
}

void model_file_close(model_file *file) {
    if (!file) return;
    munmap(file->map, (size_t)file->bytes);
    free(file);
}

// --- writing -----------------------------------------------------------------------------------------------

CF_NORETURN static void give_up(model_writer *w, const problem *why) {
    char hint[sizeof why->hint + 64];
    durable_abandon(&w->file);
    snprintf(hint, sizeof hint, "%s; the same command writes it anew",
             *why->hint ? why->hint : "mend that, or save elsewhere");
    cf_die(hint, "model file: %s", why->what);
}

static void flush(model_writer *w) {
    problem why;
    if (!durable_append(&w->file, w->buffer, w->buffered, &why)) give_up(w, &why);
    w->buffered = 0;
}

static void put_header(model_writer *w, const model_shape *s) {
    int32_t header[HEADER] = {MAGIC,
                              w->bf16 ? VERSION_BF16 : VERSION_FP32,
                              (int32_t)s->maxT,
                              (int32_t)s->V,
                              (int32_t)s->L,
                              (int32_t)s->heads,
                              (int32_t)s->C,
                              (int32_t)s->Vp};
    memcpy(w->buffer, header, sizeof header);
    w->buffered = sizeof header;
}

model_writer *model_writer_open(const char *path, const model_shape *shape, int version) {
    if (version != VERSION_FP32 && version != VERSION_BF16)
        cf_die(NULL, "model file %s: there is no version %d to write, only 3 (fp32) and 5 (bf16)", path,
               version);
    model_shape_check(shape, "model file", path);
    model_writer *w = calloc(1, sizeof *w);
    if (!w) cf_die(NULL, "out of memory for writing model file %s", path);
    w->bf16 = version == VERSION_BF16;
    w->expected = model_parameters(shape);
    int64_t bytes = HEADER_BYTES + w->expected * (w->bf16 ? 2 : 4);
    problem why;
    if (!durable_create(&w->file, path, bytes, &why)) give_up(w, &why);
    put_header(w, shape);
    return w;
}

void model_writer_append(model_writer *w, const float *values, int64_t count) {
    if (count < 0 || count > w->expected - w->elements) {
        durable_abandon(&w->file);
        cf_die(NULL, "model file %s: %lld elements appended to %lld, but the shape has %lld", w->file.path,
               (long long)count, (long long)w->elements, (long long)w->expected);
    }
    w->elements += count;
    int64_t size = w->bf16 ? 2 : 4;
    while (count > 0) {
        if (w->buffered == BUFFER_BYTES) flush(w);
        int64_t fits = (BUFFER_BYTES - w->buffered) / size, n = count < fits ? count : fits;
        char *to = w->buffer + w->buffered;
        if (w->bf16)
            for (int64_t i = 0; i < n; i++) ((uint16_t *)(void *)to)[i] = cf_bf16_of_float(values[i]);
        else
            memcpy(to, values, (size_t)(n * size));
        w->buffered += n * size;
        values += n;
        count -= n;
    }
}

void model_writer_commit(model_writer *w) {
    if (w->elements != w->expected) {
        durable_abandon(&w->file);
        cf_die(NULL, "model file %s is incomplete: %lld of %lld elements appended", w->file.path,
               (long long)w->elements, (long long)w->expected);
    }
    problem why;
    flush(w);
    if (!durable_commit(&w->file, &why)) give_up(w, &why);
    free(w);
}
