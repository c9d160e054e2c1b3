"""What commands share: errors as lines, text that a terminal may have, files that are neither pipes nor links."""
import argparse
import contextlib
import errno
import functools
import os
import re
import signal
import stat
import sys
import tempfile

if sys.version_info < (3, 9):  # which reads this file and those that are started, so they have no younger syntax
    sys.exit(f"error: Python 3.9 or later is needed; {sys.executable} is {sys.version.split()[0]}\n"
             f"hint:  start {sys.argv[0]} by a later one; make and shell scripts take the one that PYTHON names")


class Problem(Exception):
    """An error, and perhaps a hint."""

    def __init__(self, what, hint=""):
        super().__init__(what)
        self.hint = hint


def sanitize(text):
    """Text from elsewhere as it may be printed: a terminal obeys control characters (commfuse/base/sanitize.h)."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda c: c[0].encode("unicode_escape").decode(), text)


def say(text, file=None, end="\n"):
    """Prints. A closed pipe or a full disk does not stop the work."""
    try:
        file = file or sys.stdout
        if file:  # None: it was closed when the program began
            print(sanitize(text), file=file, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # Python flushes again when it ends


def note(text):
    if sys.stderr:
        say(text, sys.stderr)


class Parser(argparse.ArgumentParser):
    def __init__(self, description, formatter_class=argparse.RawDescriptionHelpFormatter, **more):
        super().__init__(description=description, formatter_class=formatter_class, **more)

    def error(self, message):
        super().error(sanitize(message))


def some_of(known):
    """A type of options: some of these names, with commas between them."""
    def parse(text):
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return text.split(",")
    return parse


def at_least(least, most=float("inf"), kind=int):
    """A type of options: numbers from `least` to `most`."""
    def number(text):
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: at least {least}, at most {most}")
        return kind(text)
    return number


def status_of(work, where="", interrupted="interrupted"):
    """Does the work and returns the exit status. Prints errors, with WHERE if they have no file name."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` removes unfinished files
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # not every terminal has every letter
    try:
        return work() or 0
    except Problem as problem:
        note(f"error: {problem}" + (f"\nhint:  {problem.hint}" if problem.hint else ""))
    except OSError as error:
        note(f"error: {error.strerror or error}: {error.filename or where}")
    except KeyboardInterrupt:
        note(interrupted)
        return 130
    return 1


def say_what_is_not_installed(kind, error, trace):
    """Of a package that an import does not find, at the top of a script too. Other errors of a script's own are shown as always."""
    if not issubclass(kind, ImportError):
        return sys.__excepthook__(kind, error, trace)
    note(f"error: {error}, in {sys.executable}\nhint:  scripts/install_deps.sh installs it, or pip as --help says; "
         f'"$(scripts/find_python.sh)" {sys.argv[0]} uses a Python that has it')


sys.excepthook = say_what_is_not_installed


def opened(path, mode="rb", **more):
    """A regular file. Whoever can write its directory could put a pipe there, which waits for its other end, or a second name of a
    file elsewhere, so nothing is written through links."""
    def opener(path, flags):
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        file = os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or (writes and found.st_nlink > 1):
            os.close(file)
            raise OSError(errno.EINVAL, "It has several names" if stat.S_ISREG(found.st_mode) else "It is not a regular file", path)
        if flags & os.O_TRUNC:
            os.ftruncate(file, 0)
        return file
    return open(path, mode, opener=opener, **more)


@contextlib.contextmanager
def appearing(path):
    """Where to make a file or a directory, which gets its name when it is whole. After an error nothing is left of it."""
    folder, name = os.path.split(os.path.abspath(path))
    os.stat(folder)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as own:
        yield os.path.join(own, name)
        os.replace(os.path.join(own, name), path)
        sync_directory(folder)


@contextlib.contextmanager
def whole(path, mode="w", **more):
    """A new file, which appears; a link of that name is replaced."""
    if (os.path.exists(path) and not os.path.isfile(path)) or os.path.dirname(os.path.abspath(path)) == "/dev":
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    with appearing(path) as new, open(new, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8", **more) as file:
        yield file
        close_synced(file)


def write_whole(path, text):
    with whole(path) as file:
        file.write(text)


def close_synced(file):
    file.flush()
    sync(file.fileno())
    file.close()


note_once = functools.cache(note)


def sync(file):
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):  # a file system without sync
            raise
        note_once("note: the file system has no sync: a power cut may undo what was written")


def sync_directory(directory):
    """Makes new names survive a power cut."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        sync(opened)
    finally:
        os.close(opened)
