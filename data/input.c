// See input.h. The page cache is the only buffer.
#include "input.h"
#include "../commfuse/base/limits.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { PIECE_BYTES = 1 << 20 };

bool input_open(input *file, const char *kind, const char *path, problem *why) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == EMFILE && cf_limits_more_files()) fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool is_open = fd >= 0 && fstat(fd, &status) == 0;
    *file = (input){.kind = kind};
    if (is_open && S_ISREG(status.st_mode)) {
        *file = (input){kind, strdup(path), status.st_size, fd};
        if (!file->path) cf_die(NULL, "out of memory for the name of %s", path);
        return true;
    }
    const int error = is_open ? EINVAL : errno;
    problem_set(why, error == EMFILE ? "raise ulimit -n" : NULL, "%s %.1500s cannot be opened: %s", kind, path,
                is_open ? "it is not a regular file" : strerror(error));
    if (why) why->unread = !is_open && error != ENOENT && error != ENOTDIR && error != ENXIO; // ENXIO: a socket
    if (fd >= 0) close(fd);
    errno = error;
    return false;
}

bool input_read(const input *file, int64_t at, void *to, int64_t bytes, problem *why) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t n = pread(file->fd, (char *)to + done, (size_t)(bytes - done), at + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            problem_set(why, "do not change files while a run reads them; make or copy it again, and start again",
                        "%s %.1500s cannot be read at byte %ld: %s", file->kind, file->path, at + done,
                        n < 0 ? strerror(errno) : "it has become shorter since it was opened");
            if (why) why->unread = n < 0;
            return false;
        }
        done += n;
    }
    return true;
}

void input_close(input *file) {
    if (file->path) close(file->fd);
    free(file->path);
    file->path = NULL;
}

bool input_check_header(const char *kind, const char *path, int64_t bytes, const header_field *field, int fields,
                        const int32_t *header, problem *why) {
    if (bytes < INPUT_HEADER_BYTES)
        return problem_set(why, NULL, "%s %.1500s has %ld bytes, less than the %d of a header", kind, path, bytes,
                           INPUT_HEADER_BYTES);
    if (header[0] != field->least)
        return problem_set(why, NULL, "%.1500s is not a %s: its first number is %d, expected %ld", path, kind, header[0],
                           field->least);
    for (int i = 1; i < fields; i++)
        if (header[i] < field[i].least || header[i] > field[i].most)
            return problem_set(why, NULL, "%s %.1500s: its %s is %d, allowed is %ld to %ld", kind, path, field[i].name, header[i],
                               field[i].least, field[i].most);
    return true;
}

bool input_header(const input *file, const header_field *field, int fields, int32_t header[INPUT_HEADER], problem *why) {
    return (file->bytes < INPUT_HEADER_BYTES || input_read(file, 0, header, INPUT_HEADER_BYTES, why)) &&
           input_check_header(file->kind, file->path, file->bytes, field, fields, header, why);
}

bool input_check_size(const input *file, int64_t bytes, const char *promise, problem *why) {
    return file->bytes == bytes ||
           problem_set(why, "it is damaged or was not copied completely; make or copy it again",
                       "%s %.1500s is %s: its header says %s, which is %ld bytes, but it has %ld", file->kind, file->path,
                       file->bytes < bytes ? "truncated" : "too long", promise, bytes, file->bytes);
}

char *input_read_all(const char *kind, const char *path, int64_t most, int64_t *bytes, problem *why) {
    input file;
    char *text = NULL;
    if (!input_open(&file, kind, path, why)) return NULL;
    *bytes = file.bytes;
    if (*bytes > most)
        problem_set(why, NULL, "%s %.1500s has %ld bytes, more than the %ld that it may have", kind, path, *bytes, most);
    else {
        text = cf_host_alloc(*bytes + 1, 1, path);
        if (!input_read(&file, 0, text, *bytes, why)) free(text), text = NULL;
    }
    input_close(&file);
    errno = EIO; // not ENOENT: the file exists
    return text;
}

bool input_hash(const char *path, file_hash *of, problem *why) {
    input file;
    if (!input_open(&file, "file", path, why)) return false;
    bool ok = true;
    char *piece = cf_host_alloc(PIECE_BYTES, 1, path);
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    of->bytes = file.bytes;
    for (int64_t at = 0; ok && at < of->bytes; at += PIECE_BYTES) {
        const int64_t count = of->bytes - at < PIECE_BYTES ? of->bytes - at : PIECE_BYTES;
        ok = input_read(&file, at, piece, count, why);
        XXH64_update(&state, piece, ok ? (size_t)count : 0);
    }
    free(piece);
    input_close(&file);
    of->hash = XXH64_digest(&state);
    return ok;
}
