// See secret.h.
#include "secret.h"
#include "die.h"
#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>
#include <sys/random.h>

enum { SHORTEST = 16 };

cf_mac cf_secret(void) {
    static const cf_mac public_key;
    const char *secret = cf_getenv("COMMFUSE_SECRET");
    const size_t length = secret ? strlen(secret) : 0;
    if (!secret) return public_key;
    if (length < SHORTEST)
        cf_die_together("openssl rand -hex 32 makes a good one", "COMMFUSE_SECRET has %zu characters; at least %d are needed",
                        length, SHORTEST);
    return cf_mac_of(&public_key, secret, length);
}

cf_mac cf_mac_of(const cf_mac *key, const void *data, size_t bytes) {
    cf_mac mac;
    if (!HMAC(EVP_sha256(), key->bytes, sizeof key->bytes, (const unsigned char *)data, bytes, mac.bytes, NULL))
        cf_die(NULL, "OpenSSL makes no HMAC-SHA256 of %zu bytes", bytes);
    return mac;
}

bool cf_mac_equal(const cf_mac *a, const cf_mac *b) {
    return CRYPTO_memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

void cf_random(void *data, size_t bytes) {
    if (getrandom(data, bytes, 0) != (ssize_t)bytes) cf_die(NULL, "the system gives no random bytes: %s", strerror(errno));
}
