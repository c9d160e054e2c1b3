"""Build the tests, run them and count them, case by case. scripts/test.sh starts this, after it has installed missing packages.

    scripts/test.sh                                    the essential tests of every part: at most 8 minutes on two cores
    scripts/test.sh --all                              everything, sanitizer builds included: at most 25 minutes
    scripts/test.sh --only mesh                        one alone (make test T=mesh)

A test program is one of
  test_*.c, gradient_*.c                   cmocka programs, built by make under BUILD/tests/
  test_*.py                                unittest files; BUILD and TRAIN_GPT in the environment say
                                           which build to look at
and may say in a comment line how it is to be run:
  ranks: 1 2 4        once with each number of ranks; 1 is a plain start without mpirun. Default: 1
  quick: 2            of these, only these numbers of ranks in the essential tests; of a Python file the cases whose names
                      contain one of these words; "none": nothing. Default: everything
  slow: audit         cases of a Python file that the essential tests leave out, by words in their names
  limit: 300          seconds that it may take on a free machine (default 120). It is ended, and has failed, after four
                      times that, since others may use the machine; in a sanitizer build after twenty times that
  python: venv        with build/venv/bin/python, which has tiktoken; skipped where that is missing
  sanitizers: too     a Python file that is also run against a sanitizer build, if that alone is asked for. (Of several
                      builds those with sanitizers run C programs only, and what is quick of them.)
  make: emulated-tests   what else of the Makefile a Python file needs, not asked of sanitizer builds

Every cmocka case and every unittest method counts once per number of ranks, and passes only if it passes on
every rank. A program that crashes, hangs or ends early fails one case more than those it has reported.
Only the standard library is used here, so that the runner itself cannot be what is missing.
"""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts"))
import command  # refuses a Python that is too old
import argparse
import concurrent.futures
import dataclasses
import fnmatch
import glob
import json
import re
import shutil
import signal
import subprocess
import tempfile
import time

import launcher

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAX_AGAIN = 3  # programs
MARK = "\x1f"  # begins the lines in which run_unittest() reports; no test prints it
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


# ------------------------------------------------------------------------------------------ what there is


@dataclasses.dataclass(frozen=True)
class Program:
    source: str
    ranks: tuple
    limit: float
    venv: bool
    sanitizers: bool
    make: tuple        # targets
    quick: tuple       # numbers of ranks, or parts of cases' names
    slow: tuple        # parts of names
    cases: tuple = ()  # patterns of those to run; none: all

    @property
    def name(self):  # "commfuse/test_fuse"
        return os.path.splitext(self.source)[0].split("/", 1)[1]

    @property
    def python(self):
        return self.source.endswith(".py")

    def binary(self, build):
        return f"{build}/tests/{self.name}"


def read_program(source):
    with open(source, encoding="utf-8") as file:
        text = file.read()

    def note(key):
        found = re.search(rf"^\s*(?://|#|\*)?\s*{key}:\s*([\w. -]+?)\s*$", text, re.MULTILINE)
        return found.group(1) if found else None

    return Program(source, tuple(int(n) for n in (note("ranks") or "1").split()), float(note("limit") or 120),
                   note("python") == "venv", note("sanitizers") == "too", tuple((note("make") or "").split()),
                   tuple((note("quick") or "").split()), tuple((note("slow") or "").split()))


def named(pattern):
    """Files of the folders and of their rooms."""
    return glob.glob(f"tests/*/{pattern}") + glob.glob(f"tests/*/*/{pattern}")


def discover():
    patterns = "test_*.c", "gradient_*.c", "test_*.py"
    return [read_program(source) for source in sorted(source for pattern in patterns for source in named(pattern))]


def has_case(program, pattern):
    """Of its own, or inherited from a module beside it."""
    with open(program.source, encoding="utf-8") as file:
        texts = [file.read()]
    for module in re.findall(r"^import (\w+)$", texts[0], re.MULTILINE):
        path = os.path.join(os.path.dirname(program.source), f"{module}.py")
        if program.python and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    return any(matches(name, pattern) for name in re.findall(r"\w+(?=\s*\()|(?<=ST\()\w+", "".join(texts)))  # f(…, and TEST(name)


def matches(name, pattern):
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


def matches_any(name, patterns):
    """One of them, or all are of the kind "!pattern", of which none may match."""
    wanted, unwanted = ([p.removeprefix("!") for p in patterns if p.startswith("!") == no] for no in (False, True))
    return (any(matches(name, p) for p in wanted) or not wanted) and not any(matches(name, p) for p in unwanted)


def select(programs, only, quick, sanitizers, alone):
    """The programs to run of one build, which may be asked for alone, with the ranks and cases to run of them."""
    if sanitizers:
        programs = [p for p in programs if not p.python or p.sanitizers and alone]
    if "thread" in sanitizers:  # the layers are OpenMP loops, which that build leaves out
        programs = [p for p in programs if p.name.startswith("commfuse/") and not p.python]
        # Pure functions have no threads, and under this sanitizer they take minutes.
        programs = [p for p in programs if alone or p.name not in ("commfuse/test_schedule", "commfuse/test_choice")]
    if quick or sanitizers and not alone:
        return [essence(p) for p in programs if p.quick != ("none",)]
    if not only:
        return programs
    # As failures print a case of a Python file: "test_meshes.Matrix.test_4x1".
    of_file = [p for p in programs if p.python and only.startswith(os.path.basename(p.name) + ".")]
    if of_file:
        return [dataclasses.replace(p, cases=(only,)) for p in of_file]

    # By the file's name, so that "fuse" is test_fuse and not all of commfuse/; by the path if it has a slash. A whole name
    # is that program, and not those whose names begin with it.
    def name(program):
        return program.name if "/" in only else os.path.basename(program.name)

    by_name = [p for p in programs if name(p) == only] or [p for p in programs if matches(name(p), only)]
    return by_name or [dataclasses.replace(p, cases=(only,)) for p in programs if has_case(p, only)]


def essence(program):
    """What the quick size runs of it."""
    if program.python:
        return dataclasses.replace(program, cases=program.quick + tuple("!" + word for word in program.slow))
    return dataclasses.replace(program, ranks=tuple(map(int, program.quick)) or program.ranks)


# ------------------------------------------------------------------------------------------ one run


@dataclasses.dataclass
class Outcome:
    program: Program
    ranks: int
    build: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all its processes that it has waited for
    cases: dict = dataclasses.field(default_factory=dict)    # name → PASSED, FAILED or SKIPPED
    reasons: list = dataclasses.field(default_factory=list)  # why skipped or ended early
    output: str = ""
    again: list = dataclasses.field(default_factory=list)    # names of cases that have passed in a second run only

    def count(self, what):
        return sum(result == what for result in self.cases.values())

    def report(self, name, result):
        """A case fails if it fails once, on any rank; it is skipped only if no rank ran it."""
        order = SKIPPED, PASSED, FAILED
        self.cases[name] = max(result, self.cases.get(name, SKIPPED), key=order.index)

    def fail(self, name, reason):
        self.cases[name] = FAILED
        self.reasons.append(reason)


def environment(build, ranks, files):
    # A directory for temporary files of its own: Open MPI's of several programs at a time come in each other's way.
    e = dict(os.environ, TMPDIR=files, CMOCKA_MESSAGE_OUTPUT="STDOUT", PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1",
             OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", BUILD=build,
             TRAIN_GPT=os.path.abspath(f"{build}/train_gpt"))
    # Two threads show what one hides, and no machine is too small for them.
    e["OMP_NUM_THREADS"] = "1" if ranks > 1 else "2"
    e.pop("CMOCKA_XML_FILE", None)
    options = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:fast_unwind_on_malloc=0",
        "LSAN_OPTIONS": "print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:report_thread_leaks=0",  # _exit() joins no threads
    }
    for name, value in options.items():
        suppressions = f"{ROOT}/tests/sanitizers/{name.split('_')[0].lower()}.supp"
        if os.path.exists(suppressions):
            value += f":suppressions={suppressions}"
        e[name] = value
    return e


# Each library's mpirun tells ranks apart in its own way, or not at all.
TO_FILES_OF_THEIR_OWN = f'exec "$@" >"$0/{launcher.RANK}" 2>&1'


def command(program, ranks, build, python, files):
    if program.python:
        interpreter = "build/venv/bin/python" if program.venv else python
        return [interpreter, "tests/run.py", "--unittest", program.source, *program.cases]
    line = [program.binary(build)]
    if "san-thread" in build and shutil.which("setarch"):
        line = ["setarch", "-R", *line]  # its shadow memory does not bear much address randomisation
    if ranks > 1:
        line = ["scripts/mpirun.sh", "-np", str(ranks), "sh", "-c", TO_FILES_OF_THEIR_OWN, files, *line]
    return line


def end_session(process):
    """End a program and all it has started: mpirun puts ranks in process groups of their own, but all of
    them are in the session that start_new_session gave us."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(stat, encoding="ascii", errors="replace") as file:
                session = int(file.read().rpartition(")")[2].split()[3])
            if session == process.pid:
                os.kill(int(stat.split("/")[2]), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            pass  # gone meanwhile
    process.wait()


running = set()  # so that an interrupted run leaves nothing behind


def execute(line, env, limit, first):
    """(exit status or None at the limit or, if asked for, at the first failure; CPU seconds, output)"""
    with tempfile.TemporaryFile() as output:  # a file, not a pipe: orphans that keep it open cannot hold us up
        process = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        running.add(process)
        deadline, cpu_seconds = time.monotonic() + limit, 0.0
        while process.returncode is None and time.monotonic() < deadline:
            time.sleep(0.2 if first else 0.01)
            if first and re.search(rb'\[  FAILED  \]|"result": "failed"', os.pread(output.fileno(), 1 << 24, 0)):
                break
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                cpu_seconds = usage.ru_utime + usage.ru_stime
        status = process.returncode
        end_session(process)
        running.discard(process)
        output.seek(0)
        return status, cpu_seconds, output.read().decode(errors="replace")


def run(program, ranks, build, python, first):
    outcome = Outcome(program, ranks, build)
    if program.venv and not os.path.exists("build/venv/bin/python"):
        outcome.report(program.name, SKIPPED)
        outcome.reasons.append("no build/venv with tiktoken: scripts/install_deps.sh --bpe")
        return outcome
    limit = program.limit * (20 if "san-" in build else 4)
    start = time.monotonic()
    files = tempfile.mkdtemp(prefix="commfuse-run-")
    os.chmod(files, 0o1777)  # as /tmp is: some tests start programs as another user
    try:
        status, outcome.cpu_seconds, outcome.output = execute(command(program, ranks, build, python, files),
                                                              environment(build, ranks, files), limit, first)
        outcome.output += "".join(told_by_ranks(files))
    except OSError as error:
        outcome.fail("(start)", f"cannot be started: {error}")
        return outcome
    finally:
        shutil.rmtree(files, ignore_errors=True)
    outcome.seconds = time.monotonic() - start
    (read_unittest if program.python else read_cmocka)(outcome)
    if program.cases and not program.python:
        outcome.cases = {name: result for name, result in outcome.cases.items() if matches_any(name, program.cases)}
    failed = outcome.count(FAILED)
    if status is None:
        reason = f"ended after {outcome.seconds:.0f} s, {'its first failure' if outcome.seconds < limit else 'its limit'}"
        outcome.reasons.append(reason) if failed else outcome.fail("(limit)", reason)
    elif status != 0 and not failed:
        outcome.fail("(end)", f"exit status {status}, though no case that it reported has failed")
    elif status == 0 and failed:
        outcome.reasons.append("exit status 0 in spite of that")
    elif not outcome.cases and not program.cases:
        outcome.fail("(nothing)", "reported no case")
    elif program.python and program.cases in ((), essence(program).cases) and outcome.count(SKIPPED) < len(outcome.cases):
        words = program.quick if program.cases else program.quick + program.slow  # with --all, too: else nobody would notice
        for word in set(words) - {"none"}:
            if not any(matches(name, word) for name in outcome.cases):
                outcome.fail("(quick)", f"no case has {word!r} in its name")
    return outcome


# ------------------------------------------------------------------------------------------ reading reports


def told_by_ranks(files):
    """What is in the files of TO_FILES_OF_THEIR_OWN, each line with its rank in front."""
    for rank in sorted(filter(str.isdigit, os.listdir(files)), key=int):
        with open(os.path.join(files, rank), encoding="utf-8", errors="replace") as file:
            yield from (f"rank {rank}: {line.rstrip()}\n" for line in file)


def read_cmocka(outcome):
    """cmocka's own lines; with several ranks each has "rank N: " in front."""
    announced, begun, reported = {}, {}, {}
    for line in outcome.output.splitlines():
        tag = re.match(r"rank (\d+): ", line)
        rank = int(tag.group(1)) if tag else 0
        line = line[tag.end():] if tag else line
        number, began, found = (re.match(text, line) for text in (
            r"\[==========\] (?:.*: )?Running (\d+) test", r"\[ RUN      \] (.+)$",
            r"\[       OK \] (.+)$|\[  SKIPPED \] (.+)$|\[  FAILED  \] (.+)$"))
        if number:
            announced[rank] = announced.get(rank, 0) + int(number.group(1))
        elif began:
            begun[rank] = began.group(1)
        elif found:
            name = found.group(found.lastindex)
            if begun.get(rank) == name:  # not one of the lists at the end
                outcome.report(name, (PASSED, SKIPPED, FAILED)[found.lastindex - 1])
                reported[rank] = reported.get(rank, 0) + 1
                del begun[rank]
    if 0 not in announced:
        outcome.fail("(start)", "did not come to its first case")
    for rank, count in sorted(announced.items()):
        missing = count - reported.get(rank, 0)
        if rank in begun:
            outcome.fail(begun[rank], f"rank {rank} did not come to the end of {begun[rank]}")
        elif missing > 0:
            outcome.fail("(end)", f"rank {rank} left out {missing} of {count} cases")


def read_unittest(outcome):
    """The lines of run_unittest()."""
    begun = None
    ended = False
    text = re.split(rf"\n{MARK}(.*)\n", outcome.output)
    for line in text[1::2]:
        report = json.loads(line)
        if "begin" in report:
            begun = report["begin"]
        elif "end" in report:
            ended = True
        else:
            begun = None
            outcome.report(report["case"], report["result"])
            if report["result"] == SKIPPED and report["reason"] not in outcome.reasons:
                outcome.reasons.append(report["reason"])
    outcome.output = "".join(text[0::2])
    if not ended:
        outcome.fail(begun or "(end)", f"ended early{', in ' + begun if begun else ''}")


def run_unittest(source, patterns):
    """In the child: run one unittest file and report each case in a line that no test prints by chance."""
    import importlib.util
    import traceback
    import unittest

    def report(**what):
        sys.stdout.flush()
        sys.stderr.flush()
        print("\n" + MARK + json.dumps(what), flush=True)

    class Result(unittest.TestResult):
        def startTest(self, test):
            super().startTest(test)
            report(begin=test.id())

        def tell(self, test, result, error=None, reason=""):
            if error:
                print(f"{test.id()}: {result}\n" + "".join(traceback.format_exception(*error)))
            report(case=test.id(), result=result, reason=reason)

        def addSuccess(self, test):
            self.tell(test, PASSED)

        def addError(self, test, err):
            super().addError(test, err)
            self.tell(test, FAILED, err)

        addFailure = addError

        def addSubTest(self, test, subtest, err):
            if err:
                super().addSubTest(test, subtest, err)
                print(subtest)
                self.tell(test, FAILED, err)

        def addSkip(self, test, reason):
            self.tell(test, SKIPPED, reason=reason)

        def addExpectedFailure(self, test, err):
            self.tell(test, PASSED)

        def addUnexpectedSuccess(self, test):
            super().addUnexpectedSuccess(test)
            print(f"{test.id()}: passed, though marked as an expected failure")
            self.tell(test, FAILED)

    def cases(suite):
        for item in suite:
            if isinstance(item, unittest.TestSuite):
                yield from cases(item)
            else:
                yield item

    name = os.path.splitext(os.path.basename(source))[0]
    beside = ROOT, *(os.path.join(ROOT, folder) for folder in ("scripts", "tests/train", "tests/bench"))
    sys.path[:0] = [os.path.dirname(os.path.abspath(source)), *beside]  # tests/ is there, as this file's folder
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except unittest.SkipTest as skip:
        report(case=name, result=SKIPPED, reason=str(skip))
        report(end=True)
        return 0
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    if patterns:
        suite = unittest.TestSuite(c for c in cases(suite) if matches_any(c.id(), patterns))
    result = Result()
    suite.run(result)
    report(end=True)
    return 0 if result.wasSuccessful() else 1


# ------------------------------------------------------------------------------------------ all runs


def full_name(program, build):
    _, sanitized, sanitizers = build.partition("san-")
    return program.name + (f", {sanitizers}" if sanitized else "")


def describe(outcome):
    failed, skipped = outcome.count(FAILED), outcome.count(SKIPPED)
    word = "FAIL" if failed else "skip" if skipped == len(outcome.cases) else "ok"
    counts = [f"{outcome.count(what)} {what}" for what in (PASSED, FAILED, SKIPPED) if outcome.count(what)]
    ranks = "" if outcome.program.python else f"{outcome.ranks} rank{'s' if outcome.ranks > 1 else ''}"
    name = full_name(outcome.program, outcome.build)
    line = (f"{word:<5} {name:<44} {ranks:<8} {outcome.seconds:7.2f} s  {outcome.cpu_seconds:7.2f} s of CPU   "
            f"{', '.join(counts) or 'no such case'}")
    return line + (f"  ({'; '.join(outcome.reasons)})" if outcome.reasons else "")


def show(outcome):
    line = describe(outcome)
    if sys.stdout.isatty() and not os.environ.get("CI") and "NO_COLOR" not in os.environ:
        line = {"FAIL": "\033[31m", "skip": "\033[33m"}.get(line[:4], "") + line + "\033[0m"
    print(line, flush=True)
    if outcome.count(FAILED):
        failed = [name for name, result in outcome.cases.items() if result == FAILED]
        print("      failed: " + ", ".join(failed))
        for text in outcome.output.rstrip().splitlines():
            print("      | " + "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text))
        sys.stdout.flush()


def run_all(chosen, python, jobs, first):
    """`chosen` is [(program, build)]. What may take long begins first."""
    runs = [(program, ranks, build) for program, build in sorted(chosen, key=lambda pair: -pair[0].limit)
            for ranks in program.ranks]
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, *one, python, first) for one in runs]
        try:
            for future in concurrent.futures.as_completed(futures):
                outcomes.append(future.result())
                show(outcomes[-1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end_session(process)
    return outcomes


def run_again(outcomes, python):
    """No test fails because the machine is busy: what did beside others has a second run, alone. If nothing fails there that is
    its result, and the summary names what had failed. Findings of a sanitizer stand; more than MAX_AGAIN are no chance."""
    failed = [o for o in outcomes if o.count(FAILED) and "san-" not in o.build]
    if len(failed) > MAX_AGAIN:
        return
    for first in failed:
        print(f"again, alone: {full_name(first.program, first.build)}")
        second = run(first.program, first.ranks, first.build, python, False)
        show(second)
        if second.count(FAILED):
            continue
        first.again = [name for name, result in first.cases.items() if result == FAILED]
        first.cases, first.seconds = second.cases, first.seconds + second.seconds
        first.cpu_seconds += second.cpu_seconds


def summary(outcomes, seconds):
    slow = sorted(outcomes, key=lambda o: -o.seconds)[:5]
    if len(outcomes) > 5:
        print(f"slowest of {len(outcomes)} runs, {seconds:.0f} s, {sum(o.cpu_seconds for o in outcomes):.0f} s of CPU: " +
              ", ".join(f"{full_name(o.program, o.build)} {'' if o.program.python else f'({o.ranks}) '}{o.seconds:.1f} s"
                        for o in slow))
    again = [f"{full_name(o.program, o.build)}: {name}" for o in outcomes for name in o.again]
    if again:
        print("failed beside others and passed alone, which is a fault to be found: " + ", ".join(again))
    passed, failed, skipped = (sum(o.count(what) for o in outcomes) for what in (PASSED, FAILED, SKIPPED))
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if passed and not failed else 1


def targets(programs, build):
    """What make has to build for these programs."""
    binaries = [p.binary(build) for p in programs if not p.python]
    if any(p.python for p in programs):
        tools = sorted(named("tool_*.c") + named("bench_*.c"))
        more = [] if "san-" in build else sorted({target for p in programs for target in p.make})
        return ["all", *binaries, *(f"{build}/{os.path.splitext(tool)[0]}" for tool in tools), *more]
    return binaries


def give_up(why):
    print(f"error: {why}", file=sys.stderr, flush=True)
    print("0 passed, 1 failed")
    return 1


def main():
    parser = argparse.ArgumentParser("scripts/test.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="everything, sanitizer builds included")
    parser.add_argument("--only", metavar="PATTERN", help="programs whose name contains or matches it (fuse, layers/, gradient_*), "
                        "or else single cases, also by the name that a failure prints (test_meshes.Matrix.test_4x1)")
    parser.add_argument("--san", metavar="LIST", help="all of a sanitizer build: address,undefined; or thread, which runs "
                        "tests/commfuse alone")
    parser.add_argument("--jobs", type=int, default=max(4, os.cpu_count() or 1),
                        help="programs at a time (default: as many as there are cores, at least 4: many of them wait)")
    parser.add_argument("--first", action="store_true", help="end a program at its first case that fails")
    parser.add_argument("--build", metavar="TARGETS", help="of make, in place of all that Python files may need")
    parser.add_argument("--list", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--unittest", nargs="+", help=argparse.SUPPRESS)
    o = parser.parse_args()
    os.chdir(ROOT)
    if o.unittest:
        return run_unittest(o.unittest[0], o.unittest[1:])
    sanitizers = [o.san] if o.san else ["", "thread", "address,undefined"] if o.all else [""]
    builds = {"build/" + (f"san-{one.replace(',', '-')}" if one else "release"): one for one in sanitizers}
    found, quick = discover(), not (o.all or o.only or o.san or o.list)
    chosen = [(program, build) for build, one in builds.items() for program in select(found, o.only, quick, one, len(builds) == 1)]
    if not chosen:
        return give_up(f"no test matches {o.only!r}" if o.only else "no tests found")
    if o.list:
        for program, build in chosen:
            print(f"{full_name(program, build):<46} ranks {' '.join(map(str, program.ranks))}"
                  f"{'  cases ' + ' '.join(program.cases) if program.cases else ''}")
        return 0
    if any(program.venv for program, _ in chosen) and subprocess.run(["scripts/install_deps.sh", "--bpe"]).returncode:
        print("the tests of the GPT-2 encoding will be skipped", flush=True)
    for build, one in builds.items():
        wanted = o.build.split() if o.build else targets([program for program, of in chosen if of == build], build)
        if wanted and subprocess.run(["make", "--no-print-directory", "-s", "-O", f"-j{os.cpu_count()}", f"SAN={one}",
                                      *wanted]).returncode:
            return give_up("the build failed, see above")
    python = subprocess.run(["scripts/find_python.sh"], capture_output=True, text=True, check=True).stdout.strip()
    start = time.monotonic()
    outcomes = run_all(chosen, python, max(1, o.jobs), o.first)
    if not o.only and not o.first:
        run_again(outcomes, python)
    return summary(outcomes, time.monotonic() - start)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
