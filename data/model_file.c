// See model_file.h. Elements are read and converted to float on request, so a rank reads only its shard of the file. The limits of
// the shape keep all products of sizes within 64 bits. The file must have exactly the size that its header gives, so every offset
// is inside it.
#include "model_file.h"
#include "atomic_file.h"
#include <float.h>

enum { VERSION_FP32 = 3, VERSION_BF16 = 5, PIECE = 1 << 16 };

// The largest model that a file may describe; Vp · C, 4 · C² · L and 3 · C · F · L stay below 2^52.
enum { MAX_T = 1 << 24, MAX_V = 1 << 24, MAX_L = 1 << 12, MAX_C = 1 << 17, MAX_F = 1 << 20 };

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

#define FIRST(name, norm, positions, activation, biases, units, magic) " " #name ": " #magic ";"
static const char *const how_to_name = "--init-from FILE: every rank must be able to read it; llm.c's, or model.bin of a run's "
                                       "--out. First numbers by block:" BLOCKS(FIRST);
static const char *const how_to_repair = "it is damaged or was not copied completely; make or copy it again";

void model_shape_check(const gpt_shape *s, const char *of, const char *path) {
    const rotary_settings *r = &s->rotary;
    const double stretched = r->factor != 0 ? MAX_T : 0, some = r->factor != 0 ? FLT_MIN : 0;
    const struct {
        const char *name;
        double value, least, most; // 0, where it is allowed: the usual one
    } field[] = {{"maximum sequence length", s->maxT, 1, MAX_T},
                 {"vocabulary", s->V, 1, MAX_V},
                 {"layers", s->L, 1, MAX_L},
                 {"heads", s->H, 1, MAX_C},
                 {"channels", s->C, 1, MAX_C},
                 {"padded vocabulary", s->Vp, 1, MAX_V},
                 {"heads of keys and values", s->KV, 0, MAX_C},
                 {"units of the MLP", s->F, 0, MAX_F},
                 {"epsilon of the norms", s->norm_eps, 0, 1},
                 {"theta", r->theta, 0, FLT_MAX},
                 {"factor of the stretch", r->factor, r->factor != 0, stretched},
                 {"low frequency factor", r->low, some, stretched},
                 {"high less low frequency factor", r->high - r->low, some, stretched},
                 {"positions before the stretch", r->original, r->factor != 0, stretched}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (!(field[i].value >= field[i].least && field[i].value <= field[i].most))
            cf_die_together(how_to_repair, "%s %s: %s is %.10g, allowed is %.10g to %.10g", of, path, field[i].name, field[i].value,
                            field[i].least, field[i].most);
    if (s->C % s->H != 0)
        cf_die_together(how_to_repair, "%s %s: %ld channels cannot be split into %ld heads", of, path, s->C, s->H);
    if (s->KV > 0 && s->H % s->KV != 0)
        cf_die_together(how_to_repair, "%s %s: %ld heads cannot share %ld of keys and values", of, path, s->H, s->KV);
    if (params_block(s)->magic == LLM_C_MAGIC && ((s->KV > 0 && s->KV != s->H) || (s->F > 0 && s->F != 4 * s->C)))
        cf_die_together("--block llama", "%s %s: GPT-2's block shares no keys and values, and has 4 units for a channel", of, path);
    if (params_block(s)->positions == ROTARY && s->C / s->H % 2 != 0)
        cf_die_together(how_to_repair, "%s %s: the %ld channels of a head are no pairs, which rotate", of, path, s->C / s->H);
    if (s->Vp < s->V)
        cf_die_together(how_to_repair, "%s %s: padded vocabulary %ld is smaller than the vocabulary %ld", of, path, s->Vp, s->V);
}

// Floats as they were given in decimal: 1e-5 rather than the nearest float's 9.99999975e-06.
static double number_of(int32_t bits) {
    float number;
    char text[32];
    memcpy(&number, &bits, sizeof number);
    snprintf(text, sizeof text, "%.7g", (double)number);
    return strtod(text, NULL);
}

static int32_t bits_of(double number) {
    const float nearest = (float)number;
    int32_t bits;
    memcpy(&bits, &nearest, sizeof bits);
    return bits;
}

// --- reading -----------------------------------------------------------------------------------------------

model_file *model_file_open(const char *path) {
    static const header_field llm_c = {"magic", LLM_C_MAGIC, LLM_C_MAGIC};
    int32_t h[INPUT_HEADER] = {0};
    char promise[64];
    problem why = {.what = ""};
    model_file *file = cf_host_alloc(1, sizeof *file, path);
    const bool is_llm_c = input_open(&file->in, "model file", path, &why) && input_header(&file->in, &llm_c, 1, h, &why);
    const block_row *block = block_rows;
    while (block->name && block->magic != h[0]) block++;
    if (!block->name || why.unread) cf_die_together(problem_hint(&why, how_to_name), "%s", why.what);
    if (h[1] != VERSION_FP32 && h[1] != VERSION_BF16)
        cf_die_together("write it again with a current exporter: older versions have no padded vocabulary",
                        "model file %s has version %d, expected %d (fp32) or %d (bf16)", path, h[1], VERSION_FP32, VERSION_BF16);
    file->bf16 = h[1] == VERSION_BF16;
    const gpt_shape *s = &file->shape;
    file->shape = (gpt_shape){.maxT = h[2], .V = h[3], .L = h[4], .H = h[5], .C = h[6], .Vp = h[7], .block = block};
    for (int i = 8; !is_llm_c && i < 12; i++)
        if (h[i] == 0) cf_die_together(how_to_repair, "model file %s: number %d of its header is 0", path, i);
    if (!is_llm_c) {
        file->shape.KV = h[8], file->shape.F = h[9];
        file->shape.norm_eps = number_of(h[10]);
        file->shape.rotary = (rotary_settings){number_of(h[11]), number_of(h[12]), number_of(h[13]), number_of(h[14]), h[15]};
    }
    model_shape_check(s, "model file", path);
    snprintf(promise, sizeof promise, "%ld parameters in %s", model_parameters(s), file->bf16 ? "bf16" : "fp32");
    if (!input_check_size(&file->in, file_bytes(s, file->bf16), promise, &why)) cf_die_together(why.hint, "%s", why.what);
    for (int tensor = 1; tensor < TENSORS; tensor++)
        file->first[tensor] = file->first[tensor - 1] + params_layers(s, tensor - 1) * tensor_elements(s, tensor - 1);
    return file;
}

void model_file_read(void *model, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    (void)kind;
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

// What llm.c's files cannot say.
static void put_more(gpt_shape s, int32_t *header) {
    s = params_filled(s);
    const double numbers[] = {s.norm_eps, s.rotary.theta, s.rotary.factor, s.rotary.low, s.rotary.high};
    header[8] = (int32_t)s.KV, header[9] = (int32_t)s.F, header[15] = (int32_t)s.rotary.original;
    for (int i = 0; i < 5; i++) header[10 + i] = bits_of(numbers[i]);
}

model_writer *model_writer_open(const char *path, const gpt_shape *shape, bool bf16) {
    model_shape_check(shape, "model file", path);
    model_writer *w = cf_host_alloc(1, sizeof *w, path);
    w->bf16 = bf16;
    problem why;
    if (!atomic_file_create(&w->file, path, file_bytes(shape, bf16), &why)) give_up(w, &why);
    const int version = bf16 ? VERSION_BF16 : VERSION_FP32;
    const block_row *block = params_block(shape);
    int32_t header[INPUT_HEADER] = {block->magic, version, shape->maxT, shape->V, shape->L, shape->H, shape->C, shape->Vp};
    if (block->magic != LLM_C_MAGIC) put_more(*shape, header);
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
