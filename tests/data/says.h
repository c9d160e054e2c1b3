// What a library of the disk says of what went wrong. After tests/death.h, which has cmocka.
#pragma once

#include "data/problem.h"
#include <string.h>

static problem why; // of the last thing that went wrong

#define ASSERT_SAYS(...)                                                                                                           \
    do {                                                                                                                           \
        const char *const words_expected[] = {__VA_ARGS__, NULL};                                                                  \
        for (const char *const *word = words_expected; *word; word++)                                                              \
            if (!strstr(why.what, *word)) fail_msg("'%s' does not say '%s'", why.what, *word);                                     \
    } while (0)
