// Safetensors files. One byte: 0, the file follows; else the header's text up to a zero byte, which gets the
// right length in front and is padded to a multiple of 8, and then the data.
#include "tests/fuzz/fuzz.h"
#include "data/safetensors.h"

// The file's name, and how many bytes of data it has if its header is sound.
static const char *put(const uint8_t *bytes, size_t size, uint64_t *data) {
    static uint8_t file[1 << 20];
    uint64_t length = 0;
    if (size == 0 || *bytes == 0) {
        bytes += size > 0, size -= size > 0;
        for (int i = 7; i >= 0 && size >= 8; i--) length = length << 8 | bytes[i];
        *data = size - 8 - length;
        return fuzz_file(0, bytes, size);
    }
    const uint8_t *text = bytes + 1, *end = memchr(text, 0, size - 1);
    length = end ? (size_t)(end - text) : size - 1;
    *data = end ? size - 1 - length - 1 : 0;
    uint64_t padded = (length + 7) / 8 * 8;
    FUZZ_CHECK(8 + padded + *data <= sizeof file);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(padded >> 8 * i);
    memcpy(file + 8, text, length);
    memset(file + 8 + length, ' ', padded - length);
    if (*data) memcpy(file + 8 + padded, end + 1, *data);
    return fuzz_file(0, file, 8 + padded + *data);
}

static volatile unsigned keep; // so that reading is not optimised away

// The tensors follow each other from the first byte of the data to the last, each is found by its name, and
// all of their bytes can be read.
static void use(const safetensors *f, uint64_t size) {
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
        FUZZ_CHECK(total <= (int64_t)size);
        for (int64_t j = 0; j < bytes; j++) sum += (unsigned char)data[j];
        next = data + bytes;
    }
    FUZZ_CHECK(total == (int64_t)size);
    keep = sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    problem why = {.what = ""};
    uint64_t data;
    safetensors *f = safetensors_open(put(bytes, size, &data), &why);
    FUZZ_CHECK(f || *why.what);
    if (f) use(f, data);
    safetensors_close(f);
    return 0;
}
