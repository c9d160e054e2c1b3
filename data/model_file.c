// See model_file.h. Elements are read and converted to float on request, so a rank reads only its shard of the file. The limits of
// the shape keep all products of sizes within 64 bits. The file must have exactly the size that its header gives, so every offset
// is inside it.
#include "model_file.h"
#include "atomic_file.h"

enum { MAGIC = 20240326, VERSION_FP32 = 3, VERSION_BF16 = 5, PIECE = 1 << 16 };

// The largest model that a file may describe; Vp · C and 4 · C² · L stay below 2^52.
enum { MAX_T = 1 << 24, MAX_V = 1 << 24, MAX_L = 1 << 12, MAX_C = 1 << 17 };

struct model_writer {
    atomic_file file;
    bool bf16;
    uint16_t half[PIECE]; // elements as bf16, before they are written
};

static int64_t tensor_elements(const gpt_shape *shape, int tensor) {
    return params_rows(shape, tensor) * params_columns(shape, tensor);
}

int64_t model_parameters(const gpt_shape *shape) {
    return params_count(shape) + (shape->Vp - shape->V) * shape->C;
}

static int64_t file_bytes(const gpt_shape *shape, bool bf16) {
    return INPUT_HEADER_BYTES + model_parameters(shape) * (bf16 ? 2 : 4);
}

static const char *const how_to_name = "--init-from FILE: every rank must be able to read it; llm.c's (first "
                                       "number 20240326), or model.bin of a run's --out";
static const char *const how_to_repair = "it is damaged or was not copied completely; make or copy it again";

void model_shape_check(const gpt_shape *s, const char *of, const char *path) {
    const struct {
        const char *name;
        int64_t value, maximum;
    } field[] = {{"maximum sequence length", s->maxT, MAX_T},
                 {"vocabulary", s->V, MAX_V},
                 {"layers", s->L, MAX_L},
                 {"heads", s->H, MAX_C},
                 {"channels", s->C, MAX_C},
                 {"padded vocabulary", s->Vp, MAX_V}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (field[i].value < 1 || field[i].value > field[i].maximum)
            cf_die_together(how_to_repair, "%s %s: %s is %ld, allowed is 1 to %ld", of, path, field[i].name, field[i].value,
                            field[i].maximum);
    if (s->C % s->H != 0)
        cf_die_together(how_to_repair, "%s %s: %ld channels cannot be split into %ld heads", of, path, s->C, s->H);
    if (s->Vp < s->V)
        cf_die_together(how_to_repair, "%s %s: padded vocabulary %ld is smaller than the vocabulary %ld", of, path, s->Vp, s->V);
}

// --- reading -----------------------------------------------------------------------------------------------

model_file *model_file_open(const char *path) {
    static const header_field magic = {"magic", MAGIC, MAGIC};
    int32_t h[INPUT_HEADER];
    char promise[64];
    problem why;
    model_file *file = cf_host_alloc(1, sizeof *file, path);
    if (!input_open(&file->in, "model file", path, &why) || !input_header(&file->in, &magic, 1, h, &why))
        cf_die_together(problem_hint(&why, how_to_name), "%s", why.what);
    if (h[1] != VERSION_FP32 && h[1] != VERSION_BF16)
        cf_die_together("write it again with a current exporter: older versions have no padded vocabulary",
                        "model file %s has version %d, expected %d (fp32) or %d (bf16)", path, h[1], VERSION_FP32, VERSION_BF16);
    file->bf16 = h[1] == VERSION_BF16;
    const gpt_shape *s = &file->shape;
    file->shape = (gpt_shape){.maxT = h[2], .V = h[3], .L = h[4], .H = h[5], .C = h[6], .Vp = h[7]};
    model_shape_check(s, "model file", path);
    snprintf(promise, sizeof promise, "%ld parameters in %s", model_parameters(s), file->bf16 ? "bf16" : "fp32");
    if (!input_check_size(&file->in, file_bytes(s, file->bf16), promise, &why)) cf_die_together(why.hint, "%s", why.what);
    for (int tensor = 1; tensor < TENSORS; tensor++)
        file->first[tensor] = file->first[tensor - 1] + params_layers(s, tensor - 1) * tensor_elements(s, tensor - 1);
    return file;
}

void model_file_read(void *model, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    const model_file *file = model;
    // bf16 is read into the end of `out` and converted in place: a converted number never overwrites one that is still needed.
    const int64_t size = file->bf16 ? 2 : 4;
    const int64_t element = file->first[tensor] + layer * tensor_elements(&file->shape, tensor) + first;
    char *read = (char *)out + count * (4 - size);
    problem why;
    if (!input_read(&file->in, INPUT_HEADER_BYTES + element * size, read, count * size, &why))
        cf_die(problem_hint(&why, how_to_name), "%s", why.what);
    for (int64_t i = 0; i < count && file->bf16; i++) {
        uint16_t half;
        memcpy(&half, read + 2 * i, sizeof half);
        out[i] = cf_float_of_bf16(half);
    }
}

void model_file_close(model_file *file) {
    if (!file) return;
    input_close(&file->in);
    free(file);
}

// --- writing -----------------------------------------------------------------------------------------------

CF_NORETURN static void give_up(model_writer *w, const problem *why) {
    char hint[sizeof why->hint + 64];
    atomic_file_abandon(&w->file);
    snprintf(hint, sizeof hint, "%s; the same command writes it again", problem_hint(why, "correct that, or save elsewhere"));
    cf_die(hint, "model file: %s", why->what);
}

static void append(model_writer *w, const void *bytes, int64_t count) {
    problem why;
    if (!atomic_file_append(&w->file, bytes, count, &why)) give_up(w, &why);
}

model_writer *model_writer_open(const char *path, const gpt_shape *shape, bool bf16) {
    model_shape_check(shape, "model file", path);
    model_writer *w = cf_host_alloc(1, sizeof *w, path);
    w->bf16 = bf16;
    problem why;
    if (!atomic_file_create(&w->file, path, file_bytes(shape, bf16), &why)) give_up(w, &why);
    const int version = bf16 ? VERSION_BF16 : VERSION_FP32;
    const int32_t header[INPUT_HEADER] = {MAGIC, version, shape->maxT, shape->V, shape->L, shape->H, shape->C, shape->Vp};
    append(w, header, sizeof header);
    return w;
}

void model_writer_append(void *writer, const float *values, int64_t count) {
    model_writer *w = (model_writer *)writer;
    if (!w->bf16) append(w, values, count * (int64_t)sizeof *values);
    for (int64_t done = 0, n; w->bf16 && done < count; done += n) {
        n = count - done < PIECE ? count - done : PIECE;
        for (int64_t i = 0; i < n; i++) w->half[i] = cf_bf16_of_float(values[done + i]);
        append(w, w->half, n * (int64_t)sizeof *w->half);
    }
}

void model_writer_commit(model_writer *w) {
    problem why;
    if (!atomic_file_commit(&w->file, &why)) give_up(w, &why);
    free(w);
}
