// ranks: 1
// Files that appear whole: whoever writes, is killed, or writes at the same time, PATH is what one of them has written.
#define _GNU_SOURCE
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/atomic_file.h"
#include <errno.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

enum { SIZE = 100000 };

static const char *removed_now; // by another process, just before it is locked here

int flock(int fd, int operation) {
    if (removed_now) unlink(removed_now);
    removed_now = NULL;
    return (int)syscall(SYS_flock, fd, operation);
}

static const char *content(char letter) {
    static char bytes[SIZE];
    memset(bytes, letter, sizeof bytes);
    return bytes;
}

static bool begin(atomic_file *file, char letter) {
    return atomic_file_create(file, scratch_path("file"), SIZE, &why) && atomic_file_append(file, content(letter), SIZE / 2, &why);
}

static bool finish(atomic_file *file, char letter) {
    return atomic_file_append(file, content(letter), SIZE - SIZE / 2, &why) && atomic_file_commit(file, &why);
}

// The letter of which the file is full; 0: there is none; '?': it is not whole, or of more than one.
static char found(void) {
    size_t size;
    char *bytes = scratch_read(scratch_path("file"), &size);
    if (!bytes) return 0;
    char letter = size == SIZE && memcmp(bytes, bytes + 1, SIZE - 1) == 0 ? bytes[0] : '?';
    free(bytes);
    return letter;
}

TEST(test_appears_whole) {
    atomic_file file;
    assert_true(begin(&file, 'a'));
    assert_int_equal(found(), 0);
    assert_true(finish(&file, 'a'));
    assert_int_equal(found(), 'a');
    assert_int_equal(scratch_entries(), 1);
    assert_true(begin(&file, 'b'));
    atomic_file_abandon(&file);
    atomic_file_abandon(&file);
    assert_int_equal(found(), 'a');
    assert_int_equal(scratch_entries(), 1);
}

// In the directory where the process is.
TEST(test_relative_name) {
    char here[PATH_MAX];
    atomic_file file;
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch), 0);
    assert_true(atomic_file_create(&file, "file", SIZE, &why) && atomic_file_append(&file, content('r'), SIZE, &why) &&
                atomic_file_commit(&file, &why));
    assert_int_equal(chdir(here), 0);
    assert_int_equal(found(), 'r');
}

static void kill_writer(char letter) {
    pid_t child = fork();
    if (child == 0) {
        atomic_file file;
        begin(&file, letter);
        kill(getpid(), SIGKILL);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

TEST(test_killed) {
    atomic_file file;
    assert_true(begin(&file, 'a') && finish(&file, 'a'));
    kill_writer('b');
    kill_writer('b');
    assert_int_equal(found(), 'a');
    assert_int_equal(scratch_entries(), 2);                  // what the last has left
    scratch_write("file.tmp.0123456789abcdef0", "other", 5); // these are nobody's
    scratch_write("file2.tmp.0123456789abcdef", "other", 5);
    assert_true(begin(&file, 'c') && finish(&file, 'c'));
    assert_int_equal(found(), 'c');
    assert_int_equal(scratch_entries(), 3);
    unlink(scratch_path("file.tmp.0123456789abcdef0"));
    unlink(scratch_path("file2.tmp.0123456789abcdef"));
}

// Whichever commits first, the file is the second's.
TEST(test_two_at_once) {
    atomic_file first, second;
    for (int order = 0; order < 2; order++) {
        assert_true(begin(&first, 'a') && begin(&second, 'b'));
        assert_string_not_equal(first.temporary, second.temporary);
        if (order == 1) assert_true(finish(&second, 'b'));
        assert_false(finish(&first, 'a'));
        ASSERT_SAYS("cannot rename", "/file", "another process writes it");
        assert_non_null(strstr(why.hint, "wait for that process"));
        if (order == 0) assert_true(finish(&second, 'b'));
        assert_int_equal(found(), 'b');
        assert_int_equal(scratch_entries(), 1);
    }
}

TEST(test_a_lock_removed_before_it_is_locked) {
    removed_now = scratch_path("lock");
    assert_int_equal(atomic_file_lock(scratch_path("lock"), &why), -1);
    ASSERT_SAYS("cannot open lock", "Stale file handle");
    int lock = atomic_file_lock(scratch_path("lock"), &why);
    assert_true(lock >= 0);
    assert_int_equal(atomic_file_lock(scratch_path("lock"), &why), -1);
    close(lock);
    unlink(scratch_path("lock"));
    assert_int_equal(scratch_entries(), 1);
}

static unsigned mode_of(const char *name) {
    struct stat status;
    assert_int_equal(stat(scratch_path(name), &status), 0);
    return status.st_mode & 0777;
}

TEST(test_modes) {
    atomic_file file;
    unlink(scratch_path("file"));
    mode_t mask = umask(022);
    umask(mask);
    assert_true(begin(&file, 'a') && finish(&file, 'a'));
    assert_int_equal(mode_of("file"), 0666 & ~mask);
    assert_int_equal(chmod(scratch_path("file"), 0640), 0); // as its owner wants it, from the first byte on
    assert_true(begin(&file, 'b'));
    assert_int_equal(mode_of(file.temporary), 0640);
    assert_true(finish(&file, 'b'));
    assert_int_equal(mode_of("file"), 0640);
    unlink(scratch_path("file"));
}

// Nobody can guess where the file beside comes to be; a link of such a name is removed, not followed.
TEST(test_links_are_not_followed) {
    atomic_file file;
    scratch_write("victim", "dear", 4);
    for (int dangling = 0; dangling < 2; dangling++) {
        assert_int_equal(symlink(scratch_path(dangling ? "nowhere" : "victim"), scratch_path("file.tmp.0123456789abcdef")), 0);
        assert_true(begin(&file, 'a') && finish(&file, 'a'));
        assert_int_equal(found(), 'a');
    }
    assert_int_equal(scratch_entries(), 2);
    size_t size;
    char *victim = scratch_read(scratch_path("victim"), &size);
    assert_string_equal(victim, "dear");
    free(victim);
    assert_int_equal(symlink(scratch_path("victim"), scratch_path("lock")), 0);
    assert_int_equal(atomic_file_lock(scratch_path("lock"), &why), -1);
    ASSERT_SAYS("cannot open lock", "symbolic links");
    unlink(scratch_path("lock"));
    unlink(scratch_path("victim"));
    unlink(scratch_path("file"));
}

static void assert_victim(void) {
    size_t size;
    char *victim = scratch_read(scratch_path("other/victim"), &size);
    assert_non_null(victim);
    assert_string_equal(victim, "dear");
    free(victim);
    assert_int_equal(mode_of("other/victim"), 0644);
}

// Whoever may write where a run saves may put a link there to a directory of the run's owner.
TEST(test_nothing_is_removed_or_written_through_a_link) {
    atomic_file file;
    assert_int_equal(mkdir(scratch_path("other"), 0777), 0);
    chmod(scratch_write("other/victim", "dear", 4), 0644);
    assert_int_equal(symlink(scratch_path("other"), scratch_path("step.tmp")), 0);
    assert_false(atomic_file_create(&file, scratch_path("step.tmp/victim"), SIZE, &why));
    ASSERT_SAYS("cannot create", "/step.tmp/victim", "Not a directory");
    assert_int_equal(scratch_entries(), 2);
    assert_true(atomic_file_remove_directory(scratch_path("step.tmp")));
    assert_int_equal(scratch_entries(), 1);
    assert_victim();
    scratch_write("file", "", 0);
    assert_false(atomic_file_remove_directory(scratch_path("file")));
    assert_int_equal(symlink(scratch_path("other"), scratch_path("linked")), 0); // one that the user names is followed
    assert_true(atomic_file_replace(scratch_path("linked/new"), "new", 3, &why));
    assert_int_equal(unlink(scratch_path("other/new")), 0);
    unlink(scratch_path("linked"));
    unlink(scratch_path("file"));
}

// A link may be swapped for the directory at any time, so what was opened once is used to the end.
TEST(test_a_directory_that_is_swapped) {
    atomic_file file;
    assert_int_equal(mkdir(scratch_path("step.tmp"), 0777), 0);
    assert_true(atomic_file_create(&file, scratch_path("step.tmp/victim"), SIZE, &why));
    assert_int_equal(rename(scratch_path("step.tmp"), scratch_path("moved")), 0);
    assert_int_equal(symlink(scratch_path("other"), scratch_path("step.tmp")), 0);
    char bait[NAME_MAX + 64];
    snprintf(bait, sizeof bait, "other/%s", file.temporary);
    scratch_write(bait, "bait", 4);
    assert_true(atomic_file_append(&file, content('a'), SIZE, &why) && atomic_file_commit(&file, &why));
    assert_victim();
    assert_int_equal(access(scratch_path(bait), F_OK), 0);
    assert_int_equal(unlink(scratch_path("moved/victim")), 0);
    unlink(scratch_path(bait));
    unlink(scratch_path("step.tmp"));
    rmdir(scratch_path("moved"));
}

// Nor through another name of a file: a lock is emptied and closed to others.
TEST(test_hard_links_are_not_taken) {
    atomic_file file;
    assert_int_equal(link(scratch_path("other/victim"), scratch_path("lock")), 0);
    assert_int_equal(link(scratch_path("other/victim"), scratch_path("file.tmp.0123456789abcdef")), 0);
    assert_int_equal(atomic_file_lock(scratch_path("lock"), &why), -1);
    ASSERT_SAYS("cannot open lock", "Too many links");
    assert_non_null(strstr(why.hint, "remove this name"));
    assert_true(begin(&file, 'a') && finish(&file, 'a'));
    assert_int_equal(found(), 'a');
    assert_victim();
    for (const char *const *name = (const char *const[]){"lock", "file", "other/victim", NULL}; *name; name++)
        assert_int_equal(unlink(scratch_path(*name)), 0);
    rmdir(scratch_path("other"));
    assert_int_equal(scratch_entries(), 0);
}

TEST(test_lock) {
    char *path = scratch_path("lock"), process[32];
    int lock = atomic_file_lock(path, &why);
    assert_true(lock >= 0);
    assert_int_equal(mode_of("lock"), 0600);
    assert_int_equal(atomic_file_lock(path, &why), -1);
    snprintf(process, sizeof process, "process %ld on host ", (long)getpid());
    ASSERT_SAYS("another run saves to", "/lock", process);
    close(lock);                                                              // the file stays
    const char *const left[] = {"process 1 on host a, and more", "proc", ""}; // of runs that have ended, or were killed meanwhile
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        lock = atomic_file_lock(scratch_write("lock", left[i], strlen(left[i])), &why);
        assert_true(lock >= 0);
        close(lock);
    }
    for (const char *const *precious = (const char *const[]){"precious", "x", NULL}; *precious; precious++) {
        struct stat status; // another program's
        path = scratch_write("lock", *precious, strlen(*precious));
        assert_int_equal(atomic_file_lock(path, &why), -1);
        ASSERT_SAYS("is not the lock of a run", "/lock", "stays as it is");
        assert_true(stat(path, &status) == 0 && status.st_size == (off_t)strlen(*precious));
    }
    unlink(path);
}

// Writes again and again until it is killed, now and then half a file.
static void write_for_ever(char letter) {
    atomic_file file;
    for (int i = 0;; i++)
        if (begin(&file, letter) && (i % 5 == 0 || !finish(&file, letter))) atomic_file_abandon(&file);
}

static pid_t start_writer(char letter) {
    pid_t parent = getpid(), child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent) write_for_ever(letter);
    _exit(1);
}

// Writers in a crowd, killed at any moment. Asserts nothing before all of them are dead.
TEST(test_many) {
    enum { WRITERS = 4, KILLS = 200 };
    pid_t writer[WRITERS];
    bool seen[128] = {false};
    unlink(scratch_path("file"));
    for (int i = 0; i < WRITERS; i++) writer[i] = start_writer((char)('A' + i));
    for (int i = 0; i < KILLS; i++) {
        nanosleep(&(struct timespec){.tv_nsec = (i % 10) * 300000}, NULL);
        seen[(int)found()] = true;
        int victim = i % WRITERS;
        kill(writer[victim], SIGKILL);
        waitpid(writer[victim], NULL, 0);
        if (i < KILLS - WRITERS) writer[victim] = start_writer((char)('A' + victim));
    }
    assert_false(seen['?']);
    assert_true(seen['A'] + seen['B'] + seen['C'] + seen['D'] > 1);
    atomic_file file;
    assert_true(begin(&file, 'z') && finish(&file, 'z'));
    assert_int_equal(found(), 'z');
    assert_int_equal(scratch_entries(), 1);
}

// A device would be replaced.
TEST(test_what_is_no_file) {
    atomic_file file;
    assert_false(atomic_file_create(&file, "/dev/null", SIZE, &why));
    ASSERT_SAYS("cannot create /dev/null", "not a regular file");
    assert_false(atomic_file_create(&file, scratch, SIZE, &why));
    ASSERT_SAYS("not a regular file");
    assert_int_equal(mkdir(scratch_path("file.tmp.0123456789abcdef"), 0700), 0); // is not ours, and in nobody's way
    assert_true(begin(&file, 'a') && finish(&file, 'a'));
    assert_int_equal(rmdir(scratch_path("file.tmp.0123456789abcdef")), 0);
}

TEST(test_names) {
    atomic_file file;
    static char name[PATH_MAX + 100];
    memset(name, 'n', sizeof name - 1);
    assert_false(atomic_file_create(&file, name, SIZE, &why));
    ASSERT_SAYS("cannot create", "File name too long");
    assert_string_equal(why.hint, "choose a shorter name");
    assert_false(atomic_file_create(&file, scratch_path("nowhere/file"), SIZE, &why));
    ASSERT_SAYS("nowhere/file", "needs 100000 bytes", "No such file");
    assert_non_null(strstr(why.hint, "is its directory there"));
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
