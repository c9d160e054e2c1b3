// See machine.h. Each field is checked against its range in a table. Names that are not in the table are refused, so that a
// misspelt name is an error.
#include "machine.h"
#include <stddef.h>
#include <stdlib.h>
#include "input.h"
#include "json.h"

enum { MACHINE_BYTES_MAX = 1 << 16 };
typedef enum { NUMBER, WHOLE, CURVE } field_kind;
typedef struct field {
    const char *name;
    field_kind kind;
    double low, high, unit, unit_x; // value · unit is stored, and for a curve x · unit_x
    size_t offset;
} field;

#define AT(member) offsetof(cf_hardware, member)
static const field fields[] = {
    {"peak_tflops", NUMBER, 1e-6, 1e6, 1e12, 0, AT(peak)},
    {"memory_gb", NUMBER, 1e-3, 1e6, 1e9, 0, AT(memory_bytes)},
    {"memory_gb_per_s", NUMBER, 1e-3, 1e6, 1e9, 0, AT(memory_bytes_per_s)},
    {"product_tflops", CURVE, 1e-9, 1e6, 1e12, 1e9, AT(product)},
    {"multiprocessors", WHOLE, 1, 1024, 1, 0, AT(multiprocessors)},
    {"persistent", WHOLE, 0, 1, 1, 0, AT(persistent)},
    {"tile_share", CURVE, 1e-3, 1, 1, 1, AT(tile)},
    {"tile_depth", NUMBER, 0, 1e4, 1, 0, AT(tile_depth)},
    {"attention_tflops", CURVE, 1e-9, 1e6, 1e12, 1e9, AT(attention_forward)},
    {"attention_backward_tflops", CURVE, 1e-9, 1e6, 1e12, 1e9, AT(attention_backward)},
    {"kernel_us", NUMBER, 0, 1e6, 1e-6, 0, AT(kernel_s)},
    {"moment_us", NUMBER, 0, 1e6, 1e-6, 0, AT(moment_s)},
    {"start_us", NUMBER, 0, 1e6, 1e-6, 0, AT(start_s)},
    {"call_us", NUMBER, 0, 1e6, 1e-6, 0, AT(call_s)},
    {"word_ns", NUMBER, 0, 1e6, 1e-9, 0, AT(word_s)},
    {"message_us", NUMBER, 0, 1e6, 1e-6, 0, AT(message_s)},
    {"native_us", NUMBER, 0, 1e6, 1e-6, 0, AT(native_s)},
    {"native_share", CURVE, 1e-6, 1, 1, 1e6, AT(native)},
};
#undef AT
#define AT(member) offsetof(cf_link, member)
static const field link_fields[] = {
    {"ranks", WHOLE, 0, 1 << 20, 1, 0, AT(ranks)},
    {"gb_per_s", NUMBER, 1e-6, 1e6, 1e9, 0, AT(bytes_per_s)},
    {"block_gb_per_s", NUMBER, 0, 1e6, 1e9, 0, AT(block_bytes_per_s)},
    {"latency_us", NUMBER, 0, 1e6, 1e-6, 0, AT(latency_s)},
    {"step_us", NUMBER, 0, 1e6, 1e-6, 0, AT(step_s)},
    {"taken", NUMBER, 0, 0.9, 1, 0, AT(taken)},
    {"copied", WHOLE, 0, 1, 1, 0, AT(copied)},
};
enum { FIELDS = sizeof fields / sizeof *fields, LINK_FIELDS = sizeof link_fields / sizeof *link_fields };

static bool refuse(problem *why, const char *path, const char *name, const char *what) {
    return problem_set(why, "scripts/machines/ has examples, data/machine.h says what each field is", "%s: \"%s\" %s", path, name,
                       what);
}

static bool read_curve(cf_curve *c, const cJSON *list, const field *f) {
    const cJSON *pair;
    c->points = 0;
    cJSON_ArrayForEach(pair, list) {
        const cJSON *x = cJSON_GetArrayItem(pair, 0), *y = cJSON_GetArrayItem(pair, 1);
        int i = c->points;
        if (i == CF_CURVE_POINTS || cJSON_GetArraySize(pair) != 2 || !cJSON_IsNumber(x) || !cJSON_IsNumber(y)) return false;
        if (!(x->valuedouble > 0 && x->valuedouble <= 1e12 && y->valuedouble >= f->low && y->valuedouble <= f->high)) return false;
        c->x[i] = x->valuedouble * f->unit_x, c->y[i] = y->valuedouble * f->unit;
        if (i > 0 && c->x[i] <= c->x[i - 1]) return false;
        c->points++;
    }
    return cJSON_IsArray(list) && c->points > 0;
}

// Reads the fields of a table from an object. It must have exactly these and some of `others`.
static bool read_fields(void *to, const cJSON *object, const field *table, int count, const char *others, const char *path,
                        problem *why) {
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        bool known = strstr(others, item->string) != NULL;
        for (int i = 0; i < count; i++) known |= strcmp(table[i].name, item->string) == 0;
        if (!known) return refuse(why, path, item->string, "is no field of a machine");
    }
    for (const field *f = table; f < table + count; f++) {
        char what[96];
        double value = 0;
        int64_t whole = 0;
        const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, f->name);
        void *at = (char *)to + f->offset;
        bool right = f->kind == CURVE   ? read_curve(at, found, f)
                     : f->kind == WHOLE ? json_whole(object, f->name, (int64_t)f->low, (int64_t)f->high, &whole)
                                        : json_number(object, f->name, f->low, f->high, &value);
        snprintf(what, sizeof what,
                 f->kind == CURVE ? "is no list of 1 to 32 pairs with ascending x, y from %g to %g" : "is no number from %g to %g",
                 f->low, f->high);
        if (!right) return refuse(why, path, f->name, found ? what : "is missing");
        if (f->kind == WHOLE) *(int *)at = (int)whole;
        if (f->kind == NUMBER) *(double *)at = value * f->unit;
    }
    return true;
}

static bool read_links(cf_hardware *h, const cJSON *list, const char *path, problem *why) {
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        cf_link *l = &h->link[h->links];
        const char *name = json_text(item, "name");
        if (h->links == CF_LINKS || !name) return refuse(why, path, "links", name ? "are more than 4" : "have a \"name\" each");
        snprintf(l->name, sizeof l->name, "%s", name);
        if (!read_fields(l, item, link_fields, LINK_FIELDS, "name", path, why)) return false;
        int below = h->links > 0 ? l[-1].ranks : 1;
        bool last = item->next == NULL;
        if (last ? l->ranks != 0 : l->ranks <= below || l->ranks % below != 0)
            return refuse(why, path, "ranks", "of each link is a multiple of the one before, and 0 of the last, which joins all");
        h->links++;
    }
    return h->links > 0 || refuse(why, path, "links", "is no list");
}

static bool read_machine(machine *m, const cJSON *object, const char *path, problem *why) {
    const char *name = json_text(object, "name"), *dtype = json_text(object, "dtype");
    *m = (machine){.hardware.gpu = json_is(object, "device", "gpu")};
    if (!cJSON_IsObject(object)) return refuse(why, path, "name", "is missing: this is no JSON object");
    if (!name || strlen(name) >= sizeof m->hardware.name) return refuse(why, path, "name", "is no text of less than 48 characters");
    if (!m->hardware.gpu && !json_is(object, "device", "cpu")) return refuse(why, path, "device", "is neither gpu nor cpu");
    if (!dtype || (strcmp(dtype, "bf16") != 0 && strcmp(dtype, "fp32") != 0))
        return refuse(why, path, "dtype", "is neither bf16 nor fp32");
    snprintf(m->hardware.name, sizeof m->hardware.name, "%s", name);
    snprintf(m->dtype, sizeof m->dtype, "%s", dtype);
    return read_fields(&m->hardware, object, fields, FIELDS, "name device dtype links comment", path, why) &&
           read_links(&m->hardware, cJSON_GetObjectItemCaseSensitive(object, "links"), path, why);
}

bool machine_read(machine *m, const char *path, problem *why) {
    int64_t bytes;
    char *text = input_read_all("machine", path, MACHINE_BYTES_MAX, &bytes, why);
    if (!text) return false;
    cJSON *object = cJSON_Parse(text);
    bool sound = read_machine(m, object, path, why);
    cJSON_Delete(object);
    free(text);
    return sound;
}
