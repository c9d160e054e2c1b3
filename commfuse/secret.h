// How ranks prove that they belong to one run: by a secret that all of them were given, and message authentication codes
// made with it (HMAC-SHA256, OpenSSL's).
//
//     COMMFUSE_SECRET        the secret itself: openssl rand -hex 32
//     COMMFUSE_SECRET_FILE   or a file that holds it, which only its owner may read
//
// Without either, codes are made with a key that everybody knows: they detect damage, but do not keep strangers out.
#ifndef CF_SECRET_H
#define CF_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef struct cf_mac { // a code, or a key to make codes with: a code that no stranger can make is a key
    unsigned char bytes[32];
} cf_mac;

// The key made of COMMFUSE_SECRET. Dies (together) of a secret that is too short, or that others can read.
cf_mac cf_secret(void);
bool cf_secret_given(void);

cf_mac cf_mac_of(const cf_mac *key, const void *data, size_t bytes);
bool cf_mac_equal(const cf_mac *a, const cf_mac *b); // takes the same time wherever they differ
void cf_random(void *data, size_t bytes);            // at most 256 unpredictable bytes

CF_EXTERN_C_END
#endif
