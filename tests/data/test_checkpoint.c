// ranks: 1
#define _GNU_SOURCE
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/checkpoint.h"
#include "data/atomic_file.h"
#include "data/input.h"
#include "data/json.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

static unsigned char byte_at(int64_t i, int64_t seed) {
    return (unsigned char)((uint64_t)(i + 1) * UINT64_C(2654435761) * (uint64_t)(2 * seed + 1) >> 13);
}

enum { RANK_BYTES = 184 };

// A rank's file: what is in it is nothing to the checkpoint.
static bool write_rank(const char *path, int64_t seed, file_hash *file) {
    unsigned char bytes[RANK_BYTES];
    for (int64_t i = 0; i < RANK_BYTES; i++) bytes[i] = byte_at(i, seed);
    *file = (file_hash){RANK_BYTES, XXH64(bytes, RANK_BYTES, 0)};
    return atomic_file_replace(path, (const char *)bytes, RANK_BYTES, &why);
}

static char *out_path(void) {
    return scratch_path("out");
}

static void wipe(void) {
    const int64_t steps[] = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 123456789};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        snprintf(path, sizeof path, "%s/step_%08lld", out_path(), (long long)steps[i]);
        atomic_file_remove_directory(path);
        strcat(path, ".damaged");
        atomic_file_remove_directory(path);
    }
    atomic_file_remove_directory(out_path());
}

static int lock_out(void) {
    const int lock = checkpoint_lock(out_path(), &why);
    if (lock < 0) fail_msg("%s", why.what);
    return lock;
}

static const char *const options[][2] = {{"tp", "2"}, {"train", "C:\\a \"b\"\n\t\x01"}, {"empty", ""}};

static cJSON *some_options(void) {
    cJSON *some = cJSON_CreateObject();
    for (int i = 0; i < 3; i++) manifest_add(some, options[i][0], "%s", options[i][1]);
    return some;
}

static bool try_save(int64_t step, int64_t ranks) {
    file_hash file[8];
    manifest m = {.step = step, .ranks = ranks, .file = file};
    char path[PATH_MAX];
    if (!checkpoint_begin(out_path(), step, &why)) return false;
    for (int64_t rank = 0; rank < ranks; rank++) {
        checkpoint_file_path(out_path(), step, rank, true, path);
        if (!write_rank(path, step + rank, &file[rank])) {
            checkpoint_abandon(out_path(), step);
            return false;
        }
    }
    m.options = some_options();
    bool committed = checkpoint_commit(out_path(), &m, &why);
    cJSON_Delete(m.options);
    return committed;
}

static void save(int64_t step, int64_t ranks) {
    if (!try_save(step, ranks)) fail_msg("%s", why.what);
}

static char *file_in(int64_t step, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "out/step_%08lld/%s", (long long)step, name);
    return scratch_path(path);
}

static void rewrite(int64_t step, const char *name, const char *bytes, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "out/step_%08lld/%s", (long long)step, name);
    scratch_write(path, bytes, size);
}

static manifest *sound(int64_t step, problem *damage) {
    manifest *m = checkpoint_manifest(out_path(), step, damage);
    for (int64_t rank = 0; m && rank < m->ranks; rank++)
        if (!checkpoint_verify(out_path(), m, rank, damage)) {
            manifest_free(m);
            return NULL;
        }
    return m;
}

// What a program does that loads: the newest of all whose hashes are right; -1 if there is none. `why` tells
// what was passed over.
static int64_t newest_sound(void) {
    problem damage, unlisted = {.what = ""};
    int64_t step = INT64_MAX;
    why = (problem){.what = ""};
    while ((step = checkpoint_newest(out_path(), step, &unlisted)) >= 0) {
        manifest *m = sound(step, &damage);
        manifest_free(m);
        if (m) return step;
        const size_t length = strlen(why.what);
        snprintf(why.what + length, sizeof why.what - length, "%s\n", damage.what);
    }
    assert_string_equal(unlisted.what, "");
    return -1;
}

TEST(test_save_and_load) {
    wipe();
    assert_int_equal(newest_sound(), -1); // no directory
    assert_string_equal(why.what, "");
    const int lock = lock_out();
    assert_int_equal(newest_sound(), -1); // nothing in it
    save(10, 1);
    save(123456789, 3); // more than eight digits
    save(20, 2);
    assert_int_equal(newest_sound(), 123456789);
    assert_string_equal(why.what, "");
    assert_int_equal(checkpoint_newest(out_path(), 123456789, &why), 20);
    manifest *m = checkpoint_manifest(out_path(), 20, &why);
    assert_int_equal(m->step, 20);
    assert_int_equal(m->ranks, 2);
    assert_int_equal(cJSON_GetArraySize(m->options), 3);
    for (int i = 0; i < 3; i++) assert_string_equal(json_text(m->options, options[i][0]), options[i][1]);
    assert_null(json_text(m->options, "dp"));
    for (int64_t rank = 0; rank < 2; rank++) {
        char path[PATH_MAX];
        checkpoint_file_path(out_path(), 20, rank, false, path);
        size_t size;
        char *bytes = scratch_read(path, &size);
        assert_int_equal(size, RANK_BYTES);
        for (int i = 0; i < RANK_BYTES; i++) assert_int_equal((unsigned char)bytes[i], byte_at(i, 20 + rank));
        free(bytes);
    }
    manifest_free(m);
    why = (problem){.what = ""};
    assert_int_equal(checkpoint_newest(out_path(), 10, &why), -1);
    assert_string_equal(why.what, "");
    assert_null(checkpoint_manifest(out_path(), 30, &why));
    ASSERT_SAYS("step_00000030/manifest.json", "No such file");
    close(lock);
}

TEST(test_step_that_is_there) {
    wipe();
    const int lock = lock_out();
    save(10, 4);
    assert_false(try_save(10, 1));
    ASSERT_SAYS("/step_00000010 exists already");
    assert_int_equal(newest_sound(), 10);
    manifest *m = checkpoint_manifest(out_path(), 10, &why);
    assert_int_equal(m->ranks, 4);
    manifest_free(m);
    save(20, 1);
    assert_int_equal(newest_sound(), 20);
    close(lock);
}

// --- damage ------------------------------------------------------------------------------------------------

static const char *const files[] = {"rank_00000.safetensors", "rank_00001.safetensors", "manifest.json"};

static void two_checkpoints(void) {
    wipe();
    const int lock = lock_out();
    save(10, 2);
    save(20, 2);
    close(lock);
    assert_int_equal(newest_sound(), 20);
}

static void assert_passed_over(const char *name) {
    assert_int_equal(newest_sound(), 10);
    char path[128];
    snprintf(path, sizeof path, "step_00000020/%s", name);
    ASSERT_SAYS(path);
}

TEST(test_every_byte_flipped) {
    two_checkpoints();
    int64_t flipped = 0;
    for (int i = 0; i < 3; i++) {
        size_t size;
        char *bytes = scratch_read(file_in(20, files[i]), &size);
        int fd = open(file_in(20, files[i]), O_WRONLY | O_CLOEXEC);
        for (size_t at = 0; at < size; at++)
            for (int bit = 0; bit < 8; bit++, flipped++) {
                char changed = (char)(bytes[at] ^ 1 << bit);
                assert_int_equal(pwrite(fd, &changed, 1, (off_t)at), 1);
                assert_passed_over(files[i]);
                assert_int_equal(pwrite(fd, &bytes[at], 1, (off_t)at), 1);
            }
        close(fd);
        free(bytes);
    }
    assert_int_equal(newest_sound(), 20);
    assert_true(flipped > 5000);
    print_message("%lld bits flipped, each noticed\n", (long long)flipped);
}

TEST(test_truncated) {
    two_checkpoints();
    for (int i = 0; i < 3; i++) {
        size_t size;
        char *bytes = scratch_read(file_in(20, files[i]), &size);
        for (size_t length = 0; length <= size + 1; length++) {
            rewrite(20, files[i], bytes, length);
            if (length != size)
                assert_passed_over(files[i]);
            else
                assert_int_equal(newest_sound(), 20);
        }
        rewrite(20, files[i], bytes, size);
        free(bytes);
    }
    assert_int_equal(newest_sound(), 20);
}

TEST(test_missing) {
    for (int i = 0; i < 3; i++) {
        two_checkpoints();
        assert_int_equal(unlink(file_in(20, files[i])), 0);
        assert_passed_over(files[i]);
        assert_int_equal(mkdir(file_in(20, files[i]), 0700), 0);
        assert_passed_over(files[i]);
        assert_int_equal(rmdir(file_in(20, files[i])), 0);
    }
    two_checkpoints(); // that of another step
    assert_int_equal(rename(file_in(20, ""), file_in(30, "")), 0);
    assert_int_equal(newest_sound(), 10);
    ASSERT_SAYS("step_00000030/manifest.json is that of step 20");
    for (int i = 0; i < 3; i++) unlink(file_in(10, files[i]));
    assert_int_equal(newest_sound(), -1);
    ASSERT_SAYS("step_00000010/manifest.json", "step_00000030/manifest.json");
}

// Manifests that are sealed and yet wrong.
TEST(test_manifests) {
#define FILE0 "{\"name\":\"rank_00000.safetensors\",\"bytes\":7,\"xxh64\":\"0123456789abcdef\"}"
#define M(version, step, ranks, options, files)                                                                                    \
    "{\"format\":\"commfuse checkpoint\",\"version\":" version ",\"step\":" step ",\"ranks\":" ranks ",\"options\":" options       \
    ",\"files\":" files ",\n"
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "not the manifest"},
        {"{\"format\":\"another\",\n", "not the manifest"},
        {"{{\n", "not the manifest"},
        {M("2", "1", "1", "{}", "[" FILE0 "]"), "version 2, expected 1"},
        {M("\"1\"", "1", "1", "{}", "[" FILE0 "]"), "no version"},
        {M("1", "-1", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1.5", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1e15", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1", "0", "{}", "[]"), "no number of ranks"},
        {M("1", "1", "65537", "{}", "[]"), "no number of ranks"},
        {M("1", "1", "2", "{}", "[" FILE0 "]"), "name 2 files"},
        {M("1", "1", "1", "{}", "[" FILE0 "," FILE0 "]"), "name 1 files"},
        {M("1", "1", "1", "{}", "{}"), "name 1 files"},
        {M("1", "1", "1", "{}", "[7]"), "file 0 is without"},
        {M("1", "1", "1", "{}", "[{\"xxh64\":\"0123456789abcdef\"}]"), "file 0 is without"},
        {M("1", "1", "1", "{}", "[{\"bytes\":7}]"), "file 0 is without"},
        {M("1", "1", "1", "{}", "[{\"name\":\"rank_00000.safetensors\",\"bytes\":-7,\"xxh64\":\"0123456789abcdef\"}]"),
         "file 0 is without"},
        {M("1", "1", "1", "[]", "[" FILE0 "]"), "no options"},
        {M("1", "1", "1", "{\"a\":1}", "[" FILE0 "]"), "option a is not a text"},
    };
    char text[1024];
    for (size_t i = 0; i <= sizeof wrong / sizeof *wrong; i++) {
        bool right = i == sizeof wrong / sizeof *wrong;
        const char *body = right ? M("1", "1", "1", "{\"a\":\"1\"}", "[" FILE0 "]") : wrong[i].text;
        int size =
            snprintf(text, sizeof text, "%s\t\"xxh64\":\t\"%016llx\"\n}\n", body, (unsigned long long)XXH64(body, strlen(body), 0));
        manifest *m = manifest_parse(text, size, "some/manifest.json", &why);
        if (!right && (m || !strstr(why.what, wrong[i].says) || !strstr(why.what, "some/manifest.json")))
            fail_msg("%s: '%s' does not say '%s'", body, m ? "sound" : why.what, wrong[i].says);
        if (!right) continue;
        assert_non_null(m);
        assert_true(m->file[0].hash == UINT64_C(0x0123456789abcdef) && m->file[0].bytes == 7);
        manifest_free(m);
    }
    assert_null(manifest_parse(text, 0, "x", &why));
    assert_null(manifest_parse("}\n", 2, "x", &why));
    ASSERT_SAYS("does not end in the hash");
}

TEST(test_manifest_numbers) {
    const int64_t largest = INT64_C(999999999999999);
    file_hash file = {.bytes = largest, .hash = UINT64_MAX};
    manifest m = {.step = largest - 1, .ranks = 1, .file = &file, .options = some_options()};
    int64_t size;
    char *text = manifest_print(&m, &size);
    manifest *again = manifest_parse(text, size, "x", &why);
    assert_non_null(again);
    assert_true(again->step == largest - 1 && again->file[0].bytes == largest && again->file[0].hash == UINT64_MAX);
    manifest_free(again);
    free(text);
    cJSON_Delete(m.options);
}

// --- one run at a time, and what dead ones leave -----------------------------------------------------------

TEST(test_lock) {
    wipe();
    const int lock = lock_out();
    char process[32], host[256] = "";
    snprintf(process, sizeof process, "process %ld", (long)getpid());
    gethostname(host, sizeof host - 1);
    assert_int_equal(checkpoint_lock(out_path(), &why), -1);
    ASSERT_SAYS("another run saves to", "/out", process, host);
    close(lock);
    // Whoever could read it could lock it, and every run out; that of an earlier version could be read.
    struct stat status;
    char *path = scratch_path("out/lock");
    assert_int_equal(chmod(path, 0644), 0);
    close(lock_out());
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    // A run that is killed holds nothing.
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        bool open = checkpoint_lock(out_path(), &why) >= 0;
        ssize_t written = write(ends[1], "x", 1);
        while (open && written == 1) pause();
        _exit(1);
    }
    char byte;
    assert_int_equal(read(ends[0], &byte, 1), 1);
    assert_int_equal(checkpoint_lock(out_path(), &why), -1);
    snprintf(process, sizeof process, "process %ld", (long)child);
    ASSERT_SAYS(process);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(lock_out());
    close(ends[0]);
    close(ends[1]);
}

TEST(test_leftovers) {
    two_checkpoints();
    static const char *const removed[] = {"out/step_00000030.tmp", "out/step_00000015.tmp", "out/step_00000020.tmp"};
    static const char *const foreign[] = {"out/step_30.tmp",   "out/step_00000030.tmp2", "out/other.tmp",
                                          "out/step_-0000030", "out/step_+0000030.tmp",  "out/step_9999999999999999999.tmp"};
    for (int i = 0; i < 3; i++) {
        char name[64];
        assert_int_equal(mkdir(scratch_path(removed[i]), 0700), 0);
        snprintf(name, sizeof name, "%s/rank_00000.safetensors.tmp", removed[i]);
        scratch_write(name, "half", 4);
    }
    for (int i = 0; i < 6; i++) scratch_write(foreign[i], "mine", 4);
    assert_int_equal(newest_sound(), 20);
    close(lock_out());
    for (int i = 0; i < 3; i++) assert_int_equal(access(scratch_path(removed[i]), F_OK), -1);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(access(scratch_path(foreign[i]), F_OK), 0);
        unlink(scratch_path(foreign[i]));
    }
    assert_int_equal(newest_sound(), 20);
}

TEST(test_begin_and_abandon) {
    two_checkpoints();
    const int lock = lock_out();
    assert_true(checkpoint_begin(out_path(), 30, &why));
    scratch_write("out/step_00000030.tmp/rank_00000.safetensors", "abc", 3);
    assert_int_equal(newest_sound(), 20);
    checkpoint_abandon(out_path(), 30);
    checkpoint_abandon(out_path(), 30);
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    file_hash file = {.bytes = 4, .hash = 0};
    manifest m = {.step = 30, .ranks = 1, .file = &file};
    assert_false(checkpoint_commit(out_path(), &m, &why)); // it was not begun
    ASSERT_SAYS("cannot find", "step_00000030.tmp/rank_00000.safetensors");
    // A file that is not what its rank says.
    assert_true(checkpoint_begin(out_path(), 30, &why));
    scratch_write("out/step_00000030.tmp/rank_00000.safetensors", "abc", 3);
    assert_false(checkpoint_commit(out_path(), &m, &why));
    ASSERT_SAYS("rank_00000.safetensors has 3 bytes, its manifest says 4");
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    assert_true(checkpoint_begin(out_path(), 30, &why));
    close(lock);
    close(lock_out()); // which removes it
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    assert_int_equal(newest_sound(), 20);
}

// --- pruning -----------------------------------------------------------------------------------------------

// Which of the steps 10, 20, … 90 are there, as a text of their tens.
static const char *left(void) {
    static char text[16];
    char *at = text;
    for (int64_t step = 10; step < 100; step += 10)
        if (access(file_in(step, ""), F_OK) == 0) *at++ = (char)('0' + step / 10);
    *at = 0;
    return text;
}

static int nine(void) {
    wipe();
    const int lock = lock_out();
    for (int64_t step = 10; step < 100; step += 10) save(step, 1);
    return lock;
}

TEST(test_prune) {
    int lock = nine();
    assert_true(checkpoint_prune(out_path(), 0, 0, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_prune(out_path(), 100, 0, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_prune(out_path(), 3, 20, &why));
    assert_string_equal(left(), "246789");
    assert_true(checkpoint_prune(out_path(), 2, 0, &why));
    assert_string_equal(left(), "89");
    assert_true(checkpoint_prune(out_path(), 1, 0, &why));
    assert_string_equal(left(), "9");
    assert_int_equal(newest_sound(), 90);
    close(lock);
    // Incomplete ones do not count, and go when they are older than what is kept.
    lock = nine();
    unlink(file_in(90, "manifest.json"));
    unlink(file_in(70, "rank_00000.safetensors"));
    assert_true(checkpoint_prune(out_path(), 2, 0, &why));
    assert_string_equal(left(), "6789");
    assert_int_equal(newest_sound(), 80);
    assert_true(checkpoint_begin(out_path(), 100, &why)); // while one is being written, that one stays
    assert_true(checkpoint_prune(out_path(), 1, 0, &why));
    assert_string_equal(left(), "89");
    assert_int_equal(access(scratch_path("out/step_00000100.tmp"), F_OK), 0);
    checkpoint_abandon(out_path(), 100);
    // No complete one: nothing is removed.
    unlink(file_in(80, "manifest.json"));
    assert_true(checkpoint_prune(out_path(), 1, 0, &why));
    assert_string_equal(left(), "89");
    close(lock);
}

static bool is_aside(int64_t step) {
    return access(scratch_path(step == 70   ? "out/step_00000070.damaged"
                               : step == 80 ? "out/step_00000080.damaged"
                                            : "out/step_00000090.damaged"),
                  F_OK) == 0;
}

// What a run has passed over does not count, though it may look complete, and is nobody's to remove.
TEST(test_set_aside) {
    int lock = nine();
    assert_true(checkpoint_set_aside(out_path(), 90, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_set_aside(out_path(), 70, &why));
    assert_string_equal(left(), "1234567");
    assert_false(is_aside(70));
    assert_true(is_aside(80) && is_aside(90));
    assert_int_equal(newest_sound(), 70);
    assert_true(checkpoint_prune(out_path(), 2, 0, &why));
    assert_string_equal(left(), "67");
    save(90, 2); // and is passed over, too
    assert_true(checkpoint_set_aside(out_path(), 70, &why));
    assert_string_equal(left(), "67");
    close(lock);
    lock = lock_out(); // which tidies up
    assert_true(is_aside(80) && is_aside(90));
    assert_true(checkpoint_set_aside(out_path(), -1, &why));
    assert_string_equal(left(), "");
    assert_true(is_aside(70));
    close(lock);
}

TEST(test_prune_that_cannot) {
    int lock = nine();
    assert_int_equal(mkdir(file_in(30, "directory"), 0700), 0);
    assert_false(checkpoint_prune(out_path(), 1, 0, &why));
    ASSERT_SAYS("cannot remove", "step_00000030.tmp");
    assert_string_equal(left(), "9");
    assert_int_equal(rmdir(scratch_path("out/step_00000030.tmp/directory")), 0);
    assert_true(checkpoint_prune(out_path(), 1, 0, &why));
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    close(lock);
}

// --- disks that are full -----------------------------------------------------------------------------------

// In a child whose files may not be longer than that; it tells what save() says through its standard error.
static void save_limited(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN); // the write fails with EFBIG instead
    problem told;
    const int lock = checkpoint_lock(out_path(), &told); // its lock is a file, too
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){bytes, bytes});
    if (lock < 0 || try_save(30, 2)) _exit(DEATH_SURVIVED);
    fputs(why.what, stderr);
    fputs(why.hint, stderr);
    close(lock);
    _exit(1);
}

TEST(test_file_size_limit) {
    two_checkpoints();
    struct stat rank, text;
    stat(file_in(20, "rank_00000.safetensors"), &rank);
    stat(file_in(20, "manifest.json"), &text);
    char needs[64];
    snprintf(needs, sizeof needs, "needs %lld bytes", (long long)rank.st_size);
    for (int64_t limit = 0; limit < rank.st_size; limit += limit < 8 ? 1 : 50) {
        ASSERT_DIES(save_limited((rlim_t)limit), "cannot write", "step_00000030.tmp/rank_00000.safetensors", needs,
                    "File too large", "ulimit -f");
        assert_int_equal(newest_sound(), 20);
        assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    }
    assert_true(text.st_size > rank.st_size);
    ASSERT_DIES(save_limited((rlim_t)text.st_size - 1), "cannot write", "step_00000030.tmp/manifest.json");
    assert_int_equal(newest_sound(), 20);
    assert_string_equal(left(), "12");
}

static bool disk_full;

ssize_t write(int fd, const void *bytes, size_t count) {
    if (!disk_full) return syscall(SYS_write, fd, bytes, count);
    errno = ENOSPC;
    return -1;
}

TEST(test_full_disk) {
    two_checkpoints();
    const int lock = lock_out();
    file_hash file;
    assert_true(checkpoint_begin(out_path(), 30, &why));
    char path[PATH_MAX];
    checkpoint_file_path(out_path(), 30, 0, true, path);
    disk_full = true;
    bool written = write_rank(path, 1, &file);
    disk_full = false;
    assert_false(written);
    ASSERT_SAYS("cannot write", "rank_00000.safetensors", "are free", "No space left on device");
    checkpoint_abandon(out_path(), 30);
    assert_int_equal(newest_sound(), 20);
    close(lock);
}

// A rank on a host that does not see the directory that rank 0 has made.
TEST(test_no_directory) {
    file_hash file;
    assert_false(write_rank(scratch_path("nowhere/rank_00000.safetensors"), 1, &file));
    ASSERT_SAYS("cannot create", "nowhere/rank_00000.safetensors", "needs 184 bytes", "No such file");
    assert_non_null(strstr(why.hint, "all hosts share"));
}

TEST(test_directories_that_cannot_be) {
    scratch_write("plain", "x", 1);
    assert_int_equal(checkpoint_lock(scratch_path("plain"), &why), -1);
    ASSERT_SAYS("cannot make directory", "Not a directory");
    assert_int_equal(checkpoint_lock(scratch_path("plain/below"), &why), -1);
    ASSERT_SAYS("plain/below", "Not a directory");
    assert_int_equal(checkpoint_lock("", &why), -1);
    assert_int_equal(checkpoint_newest(scratch_path("plain"), INT64_MAX, &why), -1);
    ASSERT_SAYS("cannot list");
    assert_true(why.unread); // nothing is known of what is there, so no new run begins
    static char name[5000];
    memset(name, 'n', sizeof name - 1);
    assert_int_equal(checkpoint_lock(name, &why), -1);
    ASSERT_SAYS("File name too long");
    name[PATH_MAX - 10] = 0;
    ASSERT_DIES(checkpoint_file_path(name, 1, 0, true, (char[PATH_MAX]){0}), "too long", "shorter --out");
    char here[PATH_MAX]; // names below the current directory, some of them new, with slashes too many
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch), 0);
    const int lock = checkpoint_lock("deep//er/", &why);
    assert_int_equal(chdir(here), 0);
    assert_true(lock >= 0);
    close(lock);
    assert_int_equal(access(scratch_path("deep/er/lock"), F_OK), 0);
    atomic_file_remove_directory(scratch_path("deep/er"));
}

static int clean(void **state) {
    wipe();
    return scratch_remove(state);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, clean);
}
