// Tokens of texts, for tests/data/test_prompt.py: `tool_prompt TOKENIZER.bin`: of each text of standard input, which a zero
// ends, a line of numbers. `tool_prompt`: a digit for each character from U+0000 to U+10FFFF, its class; - is no character.
#include "data/input.h"
#include "data/vocabulary.h"
#include <stdlib.h>

static void print_classes(void) {
    for (unsigned c = 0; c < 0x110000; c++) {
        const char bytes[4][5] = {{(char)c, 0},
                                  {(char)(0xC0 | c >> 6), (char)(0x80 | (c & 63)), 0},
                                  {(char)(0xE0 | c >> 12), (char)(0x80 | (c >> 6 & 63)), (char)(0x80 | (c & 63)), 0},
                                  {(char)(0xF0 | c >> 18), (char)(0x80 | (c >> 12 & 63)), (char)(0x80 | (c >> 6 & 63)),
                                   (char)(0x80 | (c & 63)), 0}};
        const char *text = bytes[c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3];
        putchar(cf_utf8_bytes(text) ? '0' + (int)vocabulary_class_of(text) : '-');
    }
}

int main(int argc, char **argv) {
    vocabulary *words = argc > 1 ? vocabulary_open(argv[1]) : NULL;
    char *text = NULL;
    size_t room = 0;
    if (!words) print_classes();
    for (ssize_t bytes; words && (bytes = getdelim(&text, &room, 0, stdin)) > 0;) {
        int32_t *tokens = calloc((size_t)bytes, sizeof *tokens);
        int64_t count = vocabulary_encode(words, text, bytes - 1, tokens);
        for (int64_t i = 0; i < count; i++) printf("%s%d", i > 0 ? " " : "", tokens[i]);
        printf("\n");
        free(tokens);
    }
    free(text);
    vocabulary_close(words);
    return 0;
}
