// Safetensors files. One byte: 0, the file follows; else the header's text up to a zero byte, which gets the right
// length in front and is padded to a multiple of 8, and then the data.
#include "tests/fuzz/fuzz.h"
#include "data/safetensors.h"

static const char *put(const uint8_t *bytes, size_t size) {
    static uint8_t file[1 << 20];
    if (size == 0 || *bytes == 0) return fuzz_file(0, bytes + (size > 0), size - (size > 0));
    const uint8_t *text = bytes + 1, *end = memchr(text, 0, size - 1);
    size_t length = end ? (size_t)(end - text) : size - 1, data = end ? size - 1 - length - 1 : 0;
    size_t padded = (length + 7) / 8 * 8;
    FUZZ_CHECK(8 + padded + data <= sizeof file);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(padded >> 8 * i);
    memcpy(file + 8, text, length);
    memset(file + 8 + length, ' ', padded - length);
    if (data) memcpy(file + 8 + padded, end + 1, data);
    return fuzz_file(0, file, 8 + padded + data);
}

static volatile unsigned keep; // so that reading is not optimised away

// The tensors follow each other without a gap, each is found by its name, and all of their bytes can be read.
static void use(const safetensors *f, size_t limit) {
    const char *next = NULL;
    int64_t total = 0;
    unsigned sum = 0;
    for (int64_t i = 0; i < safetensors_count(f); i++) {
        const tensor_entry *entry = safetensors_entry(f, i);
        const char *data = safetensors_data(f, i);
        int64_t bytes = tensor_entry_bytes(entry);
        FUZZ_CHECK(*entry->name && safetensors_find(f, entry->name) == i);
        FUZZ_CHECK(bytes >= 0 && (!next || data == next));
        FUZZ_CHECK((uintptr_t)data % (uintptr_t)tensor_type_bytes(entry->type) == 0);
        total += bytes;
        FUZZ_CHECK(total <= (int64_t)limit);
        for (int64_t j = 0; j < bytes; j++) sum += (unsigned char)data[j];
        next = data + bytes;
    }
    keep = sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    problem why = {.what = ""};
    safetensors *f = safetensors_open(put(bytes, size), &why);
    FUZZ_CHECK(f || *why.what);
    if (f) use(f, size);
    safetensors_close(f);
    return 0;
}
