// How ranks prove that they belong to one run: by a secret that all of them have, and message authentication codes made with it
// (OpenSSL's HMAC-SHA256).
//
//     COMMFUSE_SECRET        the secret itself: openssl rand -hex 32
//     COMMFUSE_SECRET_FILE   or a file that holds it, which only its owner may read
//
// Without either, codes are made with a public key: they detect damage, but do not keep strangers out.
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef struct cf_mac { // a code, or a key to make codes with: a code that no stranger can make serves as a key
    unsigned char bytes[32];
} cf_mac;

// The key made from COMMFUSE_SECRET. Dies (together) if the secret is too short, or if others can read it.
cf_mac cf_secret(void);
bool cf_secret_given(void);

cf_mac cf_mac_of(const cf_mac *key, const void *data, size_t bytes);
bool cf_mac_equal(const cf_mac *a, const cf_mac *b); // takes the same time wherever they differ
void cf_random(void *data, size_t bytes);            // at most 256 unpredictable bytes
