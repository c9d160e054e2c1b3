// See fuzz.h.
#define _GNU_SOURCE
#include "tests/fuzz/fuzz.h"
#include "commfuse/base/die.h"
#include "commfuse/base/limits.h"
#include "commfuse/memory.h"
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FIRST_FILE = 8, HEADER_BYTES = 1024, RAW = 255 };

jmp_buf fuzz_death;
bool fuzz_may_die;

CF_NORETURN static void die(const char *hint, const char *format, va_list arguments) {
    char text[2048]; // formatted as it would be, so that wrong arguments show
    vsnprintf(text, sizeof text, format, arguments);
    FUZZ_CHECK(*text && (!hint || *hint));
    if (fuzz_may_die) longjmp(fuzz_death, 1);
    fprintf(stderr, "died: %s\n", text);
    abort();
}

bool cf_limits_more_files(void) {
    return false;
}

int cf_die_rank(void) {
    return 0;
}

void cf_die(const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die(hint, format, arguments);
}

void cf_die_together(const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die(hint, format, arguments);
}

void *cf_host_alloc(int64_t count, size_t size, const char *purpose) {
    (void)purpose;
    return calloc((size_t)count + !count, size);
}

// Files 8 and 9, so that the pattern /proc/self/fd/[89] matches both.
const char *fuzz_file(int number, const uint8_t *bytes, size_t size) {
    static const char *const name[] = {"/proc/self/fd/8", "/proc/self/fd/9"};
    static bool made[2];
    int fd = FIRST_FILE + number;
    if (!made[number]) {
        int other = memfd_create("fuzz", 0);
        FUZZ_CHECK(other >= 0 && dup2(other, fd) == fd);
        if (other != fd) close(other);
        made[number] = true;
    }
    FUZZ_CHECK(ftruncate(fd, (off_t)size) == 0 && pwrite(fd, bytes, size, 0) == (ssize_t)size);
    return name[number];
}

const char *fuzz_headed_file(int number, const uint8_t *bytes, size_t size) {
    static uint8_t file[1 << 20];
    if (size == 0 || *bytes == RAW) return fuzz_file(number, bytes + (size > 0), size - (size > 0));
    size_t header = 4 * (size_t)*bytes;
    if (header > size - 1) header = (size - 1) / 4 * 4;
    size_t rest = size - 1 - header;
    FUZZ_CHECK(rest <= sizeof file - HEADER_BYTES);
    memset(file, 0, HEADER_BYTES);
    memcpy(file, bytes + 1, header);
    memcpy(file + HEADER_BYTES, bytes + 1 + header, rest);
    return fuzz_file(number, file, HEADER_BYTES + rest);
}
