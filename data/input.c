// See input.h. The page cache is the only buffer there is.
#include "input.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { PIECE_BYTES = 1 << 20 };

static const char *const leave_files = "leave files as they are while a run reads them; make or copy it again, and start again";

input_files *input_create(const char *kind, int64_t most) {
    input_files *all = cf_host_alloc(1, sizeof *all, kind);
    *all = (input_files){.kind = kind, .most = most, .file = cf_host_alloc(most, sizeof *all->file, kind)};
    return all;
}

bool input_add(input_files *all, const char *path, problem *why) {
    if (all->count == all->most) cf_die(NULL, "no room for another file, %s", path);
    struct stat status;
    struct rlimit files;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0) { // less is granted at first than may be asked for
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    }
    bool is_open = fd >= 0 && fstat(fd, &status) == 0;
    if (is_open && S_ISREG(status.st_mode)) {
        all->file[all->count] = (input){strdup(path), status.st_size, fd};
        if (!all->file[all->count++].path) cf_die(NULL, "out of memory for the name of %s", path);
        return true;
    }
    int error = is_open ? EINVAL : errno;
    problem_set(why, error == EMFILE ? "raise ulimit -n" : NULL, "%s %.1500s cannot be opened: %s", all->kind, path,
                !is_open                  ? strerror(error)
                : S_ISDIR(status.st_mode) ? "it is a directory, not a regular file"
                                          : "it is a device or a pipe, not a regular file");
    if (fd >= 0) close(fd);
    errno = error;
    return false;
}

bool input_read(input_files *all, int64_t file, int64_t at, void *to, int64_t bytes, problem *why) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t n = pread(all->file[file].fd, (char *)to + done, (size_t)(bytes - done), at + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return problem_set(why, leave_files, "%s %.1500s cannot be read at byte %lld: %s", all->kind, all->file[file].path,
                               (long long)(at + done), n < 0 ? strerror(errno) : "it has become shorter since it was opened");
        done += n;
    }
    return true;
}

void input_expect(input_files *all, int64_t file, int64_t at, int64_t bytes) {
    posix_fadvise(all->file[file].fd, at, bytes, POSIX_FADV_WILLNEED);
}

bool input_header(input_files *all, int64_t file, int32_t magic, int32_t header[INPUT_HEADER], problem *why) {
    const char *path = all->file[file].path;
    if (all->file[file].bytes < INPUT_HEADER_BYTES)
        return problem_set(why, NULL, "%s %.1500s has %lld bytes, less than the %d of a header", all->kind, path,
                           (long long)all->file[file].bytes, INPUT_HEADER_BYTES);
    if (!input_read(all, file, 0, header, INPUT_HEADER_BYTES, why)) return false;
    return header[0] == magic ||
           problem_set(why, NULL, "%.1500s is not a %s: its first number is %d, expected %d", path, all->kind, header[0], magic);
}

bool input_check_size(const input_files *all, int64_t file, int64_t bytes, const char *promise, problem *why) {
    const int64_t found = all->file[file].bytes;
    return found == bytes ||
           problem_set(why, "it is damaged or was not copied completely; make or copy it again",
                       "%s %.1500s is %s: its header says %s, which is %lld bytes, but it has %lld", all->kind,
                       all->file[file].path, found < bytes ? "truncated" : "too long", promise, (long long)bytes, (long long)found);
}

void input_close(input_files *all) {
    if (!all) return;
    int error = errno;
    for (input *f = all->file; f < all->file + all->count; f++) {
        close(f->fd);
        free(f->path);
    }
    free(all->file);
    free(all);
    errno = error;
}

// --- one file, whole ---

char *input_read_all(const char *kind, const char *path, int64_t most, int64_t *bytes, problem *why) {
    input_files *one = input_create(kind, 1);
    char *text = NULL;
    if (input_add(one, path, why)) {
        *bytes = one->file[0].bytes;
        errno = EIO; // whatever fails from here on, the file is there
        if (*bytes > most)
            problem_set(why, NULL, "%s %.1500s has %lld bytes, more than the %lld that it may have", kind, path, (long long)*bytes,
                        (long long)most);
        else {
            text = cf_host_alloc(*bytes + 1, 1, path);
            if (!input_read(one, 0, 0, text, *bytes, why)) {
                free(text);
                text = NULL;
            }
        }
    }
    input_close(one);
    return text;
}

bool input_hash(const char *path, int64_t *bytes, uint64_t *hash, problem *why) {
    input_files *one = input_create("file", 1);
    bool well = input_add(one, path, why);
    char *piece = cf_host_alloc(PIECE_BYTES, 1, path);
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    *bytes = well ? one->file[0].bytes : 0;
    for (int64_t at = 0; well && at < *bytes; at += PIECE_BYTES) {
        int64_t count = *bytes - at < PIECE_BYTES ? *bytes - at : PIECE_BYTES;
        well = input_read(one, 0, at, piece, count, why);
        XXH64_update(&state, piece, well ? (size_t)count : 0);
    }
    free(piece);
    input_close(one);
    *hash = XXH64_digest(&state);
    return well;
}
