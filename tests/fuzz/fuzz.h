// What the fuzz targets share. Each is a libFuzzer program of its own over one parser: any bytes may be
// refused, or taken and then used; nothing else may happen. AddressSanitizer and UndefinedBehaviorSanitizer
// watch.
//
// Some parsers refuse by cf_die(), which does not come back, and so leaves behind what they have opened and
// allocated. In these programs it is a longjmp() into FUZZ_TRY, and ledger.h, through which those parsers are
// compiled, knows what they hold: it is given back after a death, and after a parser that has come to its end
// there must be none, files and maps included. For parsers that are never to die (no FUZZ_TRY) a death is a
// crash.
#pragma once

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern jmp_buf fuzz_death;
extern bool fuzz_may_die;

#define FUZZ_TRY(statement)                                                                                                        \
    do {                                                                                                                           \
        fuzz_may_die = true;                                                                                                       \
        bool fuzz_died = setjmp(fuzz_death) != 0;                                                                                  \
        if (!fuzz_died) statement;                                                                                                 \
        fuzz_may_die = false;                                                                                                      \
        ledger_settle(fuzz_died);                                                                                                  \
    } while (0)
void ledger_settle(bool died);

#define FUZZ_CHECK(condition)                                                                                                      \
    do {                                                                                                                           \
        if (!(condition)) {                                                                                                        \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                                          \
            abort();                                                                                                               \
        }                                                                                                                          \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

// The name of a file in memory that holds these bytes; `number` (0 or 1) says which of two.
const char *fuzz_file(int number, const uint8_t *bytes, size_t size);

// Files of a 256-number header: an input is one byte, the count of header numbers in it, those numbers, and
// what comes behind the header; with 255 in front it is the file as it is. So no input is spent on zeros.
const char *fuzz_headed_file(int number, const uint8_t *bytes, size_t size);
