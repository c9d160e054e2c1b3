// Text from elsewhere (files, other ranks, strangers) as it may be printed: a terminal obeys control characters. Whatever
// goes through cf_print(), cf_die() or a problem has been through this.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "die.h"

// Bytes of the character that begins there; 0: it is no valid UTF-8 (overlong, a surrogate, past U+10FFFF, cut short). A zero
// follows the text.
static inline int cf_utf8_bytes(const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    int bytes = *at < 0x80 ? 1 : *at < 0xc2 ? 0 : *at < 0xe0 ? 2 : *at < 0xf0 ? 3 : *at < 0xf5 ? 4 : 0;
    for (int i = 1; i < bytes; i++)
        if ((at[i] & 0xc0) != 0x80) return 0; // the zero too
    if ((*at == 0xe0 && at[1] < 0xa0) || (*at == 0xed && at[1] > 0x9f)) return 0;
    if ((*at == 0xf0 && at[1] < 0x90) || (*at == 0xf4 && at[1] > 0x8f)) return 0;
    return bytes;
}

// Puts '?' for every byte of what may not be printed (no UTF-8, or C0 but a line's end and a tab, DEL or C1), and returns the text.
static inline char *cf_sanitize(char *text) {
    for (char *at = text; *at;) {
        const unsigned char first = (unsigned char)at[0], second = (unsigned char)at[1];
        int bytes = cf_utf8_bytes(at);
        if ((first < ' ' && first != '\n' && first != '\t') || first == 0x7f || (first == 0xc2 && second < 0xa0)) bytes = 0;
        if (!bytes) *at = '?';
        at += bytes ? bytes : 1;
    }
    return text;
}

// printf() of what may be printed.
static inline int cf_print_list(FILE *to, const char *format, va_list values) {
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&text, &size);
    const int length = memory ? vfprintf(memory, format, values) : -1;
    if (memory && fclose(memory) == 0) fputs(cf_sanitize(text), to);
    free(text);
    return length;
}

CF_PRINTF(2, 3) static inline int cf_print(FILE *to, const char *format, ...) {
    va_list values;
    va_start(values, format);
    const int length = cf_print_list(to, format, values);
    va_end(values);
    return length;
}
