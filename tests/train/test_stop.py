"""Signals: the first asks a run to end, which it does after the step it is in, saved and with status 75; the same command
goes on, until the run is the one that was never stopped. A second signal ends it at once.

Open MPI's mpirun passes SIGUSR1 on. Told to end (SIGTERM, SIGINT), it sends SIGCONT, waits, SIGTERM, waits, SIGKILL, by
default a second each, and its own status is no longer that of the ranks.
"""
# quick: test_2x1 1x2_up at_once second_signal without_out reads
# limit: 240
import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import time
import unittest

import checkpoints
import harness
import launcher
import test_saving

SAME_S = 0.5  # signals closer together are one


def events(log, kind):
    return harness.events(harness.read_log(log), kind)


class Stopping(checkpoints.Case):
    samples, steps = 16, 400  # a busy machine must not end the run before its signal comes

    @classmethod
    def recipe(cls, *mesh, **more):
        return super().recipe(*mesh, **dict(val_every=25) | more)

    def steps_of(self, log):
        return [s["step"] for s in harness.events(harness.read_log(log), "step")]

    def in_training(self, started, out, log, steps=5):
        """Waits until this start has taken some steps."""
        first = checkpoints.newest(out)
        harness.wait_until(lambda: started.ended() or "MFU" in started.texts()[0], 30, "the first step")
        harness.wait_until(lambda: started.ended() or len(self.steps_of(log)) >= first + steps, 30, "some steps")
        self.assertIn(started.process.poll(), (None, 0), str(started.result()))

    def signalled(self, number, to, out, log, tries=5, **values):
        """A start that has ended, and how. Where a busy machine lets the signal through after the last step: once more."""
        before = self.fresh("before")
        if os.path.exists(out):
            shutil.copytree(out, before)
            shutil.copy(log, before + ".jsonl")
        started = self.start(out=out, log=log, **values)
        self.in_training(started, out, log)
        with contextlib.suppress(KeyError, ProcessLookupError):  # it has ended
            ranks = started.processes()
            for pid in [started.process.pid] if to is None else ranks.values() if to == "all" else [ranks[to]]:
                os.kill(pid, number)
        result = started.wait(60)
        if checkpoints.newest(out) < self.steps or tries == 1:
            return started, result
        self.assertEqual(result.status, 0, str(result))
        shutil.rmtree(out)
        os.remove(log)
        if os.path.exists(before):
            shutil.move(before, out)
            shutil.move(before + ".jsonl", log)
        return self.signalled(number, to, out, log, tries - 1, **values)

    def stop(self, number, to, out, log, told=None, status=checkpoints.STOPPED, **values):
        """One start, ended by a signal to rank `to` (None: to what was started). The step it has come to."""
        started, result = self.signalled(number, to, out, log, **values)
        by_mpirun = to is None and started.command[0] == harness.MPIRUN
        trusted = not by_mpirun or launcher.tells_status_after_signals()
        self.assertIn(result.status, (status,) if trusted else (status, 0), str(result))
        started.leaves_nobody()
        reason = signal.strsignal(told or number)
        end = harness.read_log(log)[-1]
        self.assertEqual((end["event"], end.get("stopped_by")), ("end", reason), str(result))
        step = end["steps"]
        if not (told and launcher.falls_silent()):
            said = rf"(?m)^stopped   by a signal \({reason}\) after {step} of {self.steps} steps"
            self.assertRegex(result.out, said, str(result))
        self.assertEqual(self.steps_of(log), list(range(step)))
        self.assertEqual(checkpoints.newest(out), step)
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))
        return step

    def goes_on(self, out, log, expected, starts, **values):
        self.run_with(out=out, log=log, **values)
        found = self.assertSameRun(log, expected[1])
        self.assertSameEnd(out, expected[0])
        self.assertEqual(len(harness.events(found, "resume")), starts - 1)


class Timeline(checkpoints.Case):
    def test_in_the_step_before_it_begins_or_ends(self):
        """After the gradients' norm, with which other signals come: what is updated late is saved, too."""
        shim = test_saving.build_shim(self, "train/preload_disk.c")
        still = dict(val=None, val_every=0)
        for steps in "5:6", "2:5":
            out, log = self.fresh("out"), self.fresh("log.jsonl")
            values = self.recipe(out=out, log=log, trace=self.fresh("trace.json"), trace_steps=steps, **still)
            result = harness.run(harness.options(**values), env=dict(LD_PRELOAD=shim, SIGNAL_AT='"step":3,"loss"'))  # in step 4
            self.assertEqual(result.status, checkpoints.STOPPED, str(result))
            self.assertEqual(checkpoints.newest(out), 5)
            self.run_with(out=out, log=log, **still)
            self.assertSameEnd(out, self.undisturbed(1, 1, **still)[0])


class Stop(Stopping):
    def check_mesh(self, stops, tp=1, dp=1, **more):
        expected = self.undisturbed(tp, dp, save_every=0, **more)
        out, log, come_to = self.fresh("out"), self.fresh("log.jsonl"), [0]
        for number, to in stops:
            come_to.append(self.stop(number, to, out, log, tp=tp, dp=dp, **more))
            self.assertGreater(come_to[-1], come_to[-2])
        self.goes_on(out, log, expected, len(stops) + 1, tp=tp, dp=dp, **more)

    def test_1x1(self):
        self.check_mesh([(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGUSR1, None), (signal.SIGHUP, None)])

    def test_2x1(self):
        self.check_mesh([(signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGUSR1, None)], 2, 1)

    def test_1x2_up(self):
        self.check_mesh([(signal.SIGINT, 0), (signal.SIGUSR1, 1), (signal.SIGTERM, 1)], 1, 2, strategy="up")

    def test_2x2(self):
        self.check_mesh([(signal.SIGUSR1, None), (signal.SIGTERM, 3), (signal.SIGINT, 2)], 2, 2, overlap="direct")

    def test_without_overlap(self):
        self.check_mesh([(signal.SIGTERM, 1), (signal.SIGUSR1, 0)], 2, 1, overlap="none")

    def test_sliced(self):
        self.check_mesh([(signal.SIGTERM, 1), (signal.SIGUSR1, 0)], 1, 2, overlap="slice")

    def test_every_rank_at_once(self):
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        _, result = self.signalled(signal.SIGTERM, "all", out, log, tp=2, dp=2, overlap="ring")
        self.assertEqual(result.status, checkpoints.STOPPED, str(result))
        self.assertEqual(result.err.count("ends after this step"), 4, str(result))
        expected = self.undisturbed(2, 2, save_every=0, overlap="direct")  # the same bits as ring
        self.goes_on(out, log, expected, 2, tp=2, dp=2, overlap="ring")

    def test_stopped_and_killed(self):
        """What is watched before a step is in the log once, though it is done again: the run is stopped, goes on, watches,
        and is killed before it saves."""
        more = dict(val_every=1, sample_every=40)
        expected = self.undisturbed(1, 1, save_every=0, **more)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        first = self.stop(signal.SIGTERM, None, out, log, **more)
        started = self.start(out=out, log=log, **more)
        self.in_training(started, out, log)
        started.kill()
        self.assertEqual(checkpoints.newest(out), first)
        self.assertIn(first, [v["step"] for v in harness.events(harness.read_log(log), "val")])
        self.run_with(out=out, log=log, **more)
        found = self.assertSameRun(log, expected[1])
        self.assertSameEnd(out, expected[0])
        self.assertEqual(*([(s["step"], s["text"]) for s in harness.events(which, "sample")]
                           for which in (found, harness.read_log(expected[1]))))

    def test_a_timeline_so_far(self):
        out, log, trace = self.fresh("out"), self.fresh("log.jsonl"), self.fresh("trace.json")
        end = self.stop(signal.SIGTERM, 0, out, log, tp=2, trace=trace, trace_steps=f"2:{self.steps}")
        with open(trace, encoding="utf-8") as file:
            steps = {event["args"]["step"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"}
        self.assertEqual(steps, set(range(2, end)))

    def test_the_second_signal(self):
        """Rank 0 waits for one that is frozen: the first signal changes nothing, nor do its repeats; the next ends it."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        first = self.stop(signal.SIGTERM, 0, out, log, tp=2)
        started = self.start(tp=2, out=out, log=log, timeout=60)
        self.in_training(started, out, log)
        ranks = started.processes()
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(ranks[0], signal.SIGTERM)
        harness.wait_until(lambda: "ends after this step" in started.texts()[1], 10, "an answer")
        os.kill(ranks[0], signal.SIGTERM)  # launchers send it twice
        time.sleep(SAME_S + 0.2)
        self.assertIn(0, started.processes())
        os.kill(ranks[0], signal.SIGTERM)
        result = started.wait(30)
        self.assertNotIn(result.status, (0, checkpoints.STOPPED), str(result))
        self.assertRegex(result.err, r"error: rank 0 of 2 \(.*\): asked to end at once \(SIGTERM\)")
        self.assertEqual(checkpoints.steps_in(out), [first])
        started.leaves_nobody()
        expected = self.undisturbed(2, 1, save_every=0)
        self.run_with(tp=2, out=out, log=log)
        self.assertSameRun(log, expected[1])
        self.assertSameEnd(out, expected[0])

    def test_without_out(self):
        started = self.start(tp=2, log=self.fresh("log.jsonl"))
        harness.wait_until(lambda: started.ended() or "MFU" in started.texts()[0], 30, "the first step")
        os.kill(started.processes()[1], signal.SIGTERM)
        result = started.wait()
        self.assertEqual(result.status, 1, str(result))
        self.assertFails(result, "nothing was saved", "Terminated", "--out")

    def started_into_a_pipe(self, out, log, fill=0):
        """A start that prints into a pipe, and the end that nobody reads."""
        reads, writes = os.pipe()
        os.write(writes, bytes(fill))
        options = harness.options(**self.recipe(out=out, log=log))
        started = harness.Run(options, wrapper=("sh", "-c", f'exec "$@" >&{writes}', "sh"), pass_fds=(writes,))
        self.addCleanup(started.close)
        os.close(writes)
        return started, reads

    def test_who_reads_has_gone(self):
        """As `| tee` does on Ctrl-C, before the run is told."""
        expected = self.undisturbed(1, 1, save_every=0)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        started, reads = self.started_into_a_pipe(out, log)
        harness.wait_until(lambda: started.ended() or len(self.steps_of(log)) >= 5, 30, "some steps")
        os.close(reads)
        os.kill(started.process.pid, signal.SIGINT)
        result = started.wait()
        self.assertEqual(result.status, checkpoints.STOPPED, str(result))
        self.goes_on(out, log, expected, 2)

    def test_nobody_reads(self):
        """The pipe is full before long; the run goes on without what it would print, and stops when it is told."""
        expected = self.undisturbed(1, 1, save_every=0)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        started, reads = self.started_into_a_pipe(out, log, fill=15 << 12)  # of its sixteen pages
        harness.wait_until(lambda: started.ended() or len(self.steps_of(log)) >= 90, 60, "more steps than it can print")
        os.kill(started.process.pid, signal.SIGINT)
        harness.wait_until(lambda: checkpoints.newest(out), 30, "a checkpoint")
        printed = b""
        while more := os.read(reads, 1 << 16):
            printed += more
        os.close(reads)
        result = started.wait()
        self.assertEqual(result.status, checkpoints.STOPPED, str(result))
        self.assertLess(printed.count(b"MFU"), len(self.steps_of(log)))
        self.goes_on(out, log, expected, 2)

    def test_a_terminal_that_stops_reading_costs_no_time(self):
        """Nor does what comes between steps: all is printed when it reads again, but for the steps' lines."""
        for reader in (os.pipe, pty.openpty, lambda: [end.detach() for end in socket.socketpair()]):
            reads, writes = reader()
            os.set_blocking(writes, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writes, b"before\n" * 500)
            os.set_blocking(writes, True)
            log = self.fresh("log.jsonl")
            options = harness.options(**self.recipe(log=log, val_every=1, steps=60))
            started = harness.Run(options, wrapper=("sh", "-c", f'exec "$@" >&{writes}', "sh"), pass_fds=(writes,))
            self.addCleanup(started.close)
            os.close(writes)
            harness.wait_until(lambda: started.ended() or events(log, "end"), 30, "its end, which nobody has read of")
            self.assertTrue(os.get_blocking(reads))
            steps = [step["step_ms"] for step in events(log, "step")]
            self.assertEqual(len(steps), 60)
            printed = b""
            with contextlib.suppress(OSError):  # a terminal whose other end is closed
                while more := os.read(reads, 1 << 16):
                    printed += more
            os.close(reads)
            self.assertEqual(started.wait().status, 0)
            self.assertEqual(printed.count(b"validation loss"), 61)
            self.assertLess(sorted(steps)[30], 100)

    def test_closed_streams(self):
        """No library gets their numbers, neither in the program nor in the launcher."""
        for closed, ranks in ("<&- >&- 2>&-", 1), ("<&- >&- 2>&-", 2), ("<&-", 1), (">&-", 2), ("2>&-", 2), ("<&- 2>&-", 2):
            with self.subTest(closed=closed, ranks=ranks):
                mark, log = self.fresh("mark"), self.fresh("log.jsonl")
                line = [*([harness.MPIRUN, "-np", str(ranks)] if ranks > 1 else []), harness.PROGRAM,
                        *harness.options(**self.recipe(ranks, 1, log=log, steps=60))]
                process = subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *line], cwd=harness.ROOT,
                                           env=harness.environment(**{harness.MARK: mark}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                self.addCleanup(process.kill)
                harness.wait_until(lambda: process.poll() is not None or len(self.steps_of(log)) > 5, 30, "some steps")
                for pid, _ in harness.marked(mark):
                    for fd in range(3):
                        file = os.readlink(f"/proc/{pid}/fd/{fd}")
                        self.assertTrue(ranks > 1 or file == "/dev/null", f"{fd} is {file}")
                self.assertEqual(process.wait(60), 0)
                self.assertEqual(len(self.steps_of(log)), 60)

    def test_in_the_last_step_it_is_done(self):
        """A signal that comes too late to stop anything: the run ends as it would have."""
        expected = self.undisturbed(1, 1, save_every=0)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        started = self.start(out=out, log=log)
        harness.wait_until(lambda: started.ended() or len(self.steps_of(log)) == self.steps, 30, "the last step",
                           interval=0)
        if not started.ended():
            os.kill(started.process.pid, signal.SIGTERM)
        result = started.wait()
        self.assertIn(result.status, (0, -signal.SIGTERM), str(result))
        if result.status == 0:
            self.assertSameRun(log, expected[1])
            self.assertSameEnd(out, expected[0])


@unittest.skipUnless(launcher.open_mpi(), "only Open MPI's mpirun is known this well")
class Mpirun(Stopping):
    """mpirun is told to end. It passes that on, and kills a while later, here long enough to save on a busy machine. All the
    time it sleeps and reads nothing, so steps are long: some 160 lines fill its pipe."""
    samples, steps = 256, 10 ** 6

    def stopped_twice(self, number):
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        first = self.stop(number, None, out, log, told=signal.SIGTERM, status=1, env=launcher.killing_after(3), tp=2)
        self.assertGreater(self.stop(signal.SIGUSR1, 0, out, log, tp=2), first)

    def test_ended_by_mpirun(self):
        self.stopped_twice(signal.SIGTERM)

    def test_from_the_keyboard(self):
        self.stopped_twice(signal.SIGINT)
