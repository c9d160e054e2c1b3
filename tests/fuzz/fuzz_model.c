// Model files: every element of every tensor of what is taken is read.
#include "tests/fuzz/fuzz.h"
#include "data/model_file.h"

static void use(const char *path) {
    static float values[1 << 18];
    model_file *file = model_file_open(path);
    gpt_shape shape = file->shape;
    int64_t read = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&shape, tensor); layer++) {
            int64_t count = params_rows(&shape, tensor) * params_columns(&shape, tensor);
            FUZZ_CHECK(count >= 1 && count <= (int64_t)(sizeof values / sizeof *values));
            model_file_read(file, STATE_WEIGHT, tensor, layer, 0, count, values);
            read += count;
        }
    FUZZ_CHECK(read == model_parameters(&shape));
    model_file_close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const char *path = fuzz_headed_file(0, bytes, size);
    FUZZ_TRY(use(path));
    return 0;
}
