// See secret.h.
#include "secret.h"
#include "../base/die.h"
#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SHORTEST = 16, LONGEST = 4096 };

bool cf_secret_given(void) {
    return cf_getenv("COMMFUSE_SECRET") || cf_getenv("COMMFUSE_SECRET_FILE");
}

static size_t read_secret(const char *path, char *text) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO without a writer must not block the start
    struct stat is;
    if (fd < 0 || fstat(fd, &is) != 0)
        cf_die_together("openssl rand -hex 32 >FILE; chmod 600 FILE", "COMMFUSE_SECRET_FILE %s: %s", path, strerror(errno));
    if (!S_ISREG(is.st_mode) || is.st_uid != geteuid() || (is.st_mode & 077) != 0)
        cf_die_together("it must be a regular file that belongs to you: chmod 600 FILE",
                        "COMMFUSE_SECRET_FILE %s is not a file that only you can read", path);
    ssize_t length = read(fd, text, LONGEST);
    close(fd);
    while (length > 0 && strchr("\r\n", text[length - 1])) length--;
    return length > 0 ? (size_t)length : 0;
}

cf_mac cf_secret(void) {
    static const cf_mac public_key;
    const char *secret = cf_getenv("COMMFUSE_SECRET"), *path = cf_getenv("COMMFUSE_SECRET_FILE");
    char text[LONGEST];
    if (!secret && !path) return public_key;
    size_t length = secret ? strlen(secret) : read_secret(path, text);
    if (length < SHORTEST)
        cf_die_together("openssl rand -hex 32 makes a good one", "%s has %zu characters; at least %d are needed",
                        secret ? "COMMFUSE_SECRET" : path, length, SHORTEST);
    return cf_mac_of(&public_key, secret ? secret : text, length);
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
