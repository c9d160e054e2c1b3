"""scripts/gpu_check.py without a GPU: its plan, its figures, its judgement, and its reports of failures. The modules of
tests/gpu are tested.

limit: 120
"""
import collections
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "gpu_check.sh")
import gpu_check
from gpu import check as checks
from gpu import losses, ranks, times, twins
from gpu.check import FAIL, LATE, OK, SKIP, Check
from runner import Late, Result, Runner
from tokens import write_tokens


class Recorder:
    """Takes verdicts in place of a whole check."""

    def __init__(self):
        self.verdicts, self.details = [], []

    def verdict(self, what, verdict, detail=""):
        self.verdicts.append(verdict)
        self.details.append(detail)
        return verdict == OK

    judge = Check.judge


class Quiet(unittest.TestCase):
    """With a check whose reports go to a separate directory."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, self.folder)
        silence = contextlib.redirect_stdout(io.StringIO())
        silence.__enter__()
        self.addCleanup(silence.__exit__, None, None, None)
        self.check = Check(gpu_check.parse(["--out", self.folder]))
        self.addCleanup(self.check.scratch.cleanup)
        self.check.stage = "test"

    def script(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    def program(self, text):
        """Takes the place of all that is built."""
        path = self.script("program", text)
        self.check.program = lambda *_: path

    def verdicts(self):
        return [row[2] for row in self.check.rows]


class Plan(unittest.TestCase):
    def test_all_stages_end_within_the_budget(self):
        stages, left = gpu_check.selected(list(gpu_check.STAGES)), 590
        self.assertEqual(stages, list(gpu_check.STAGES))
        for i in range(len(stages)):
            self.assertGreater(gpu_check.first_share(stages[i:], left), 0)
            left -= gpu_check.first_share(stages[i:], left)
        self.assertAlmostEqual(left, 0)

    def test_what_tells_most_comes_first(self):
        plain = gpu_check.parse([])
        self.assertEqual(gpu_check.selected(plain.only), ["build", "device", "twins", "steps", "kernels", "losses", "accumulation",
                                                          "ranks", "others"])
        self.assertLess(plain.budget, 600)

    def test_what_runs_programs_builds_them(self):
        self.assertEqual(gpu_check.selected(["times"]), ["build", "times"])
        self.assertEqual(gpu_check.selected(["losses", "twins"]), ["build", "twins", "losses"])
        self.assertEqual(gpu_check.selected(["device"]), ["device"])

    def test_every_kernel_has_its_twin_in_both_types(self):
        cases = [*twins.MAIN, *twins.OTHERS]
        for kind in checks.TYPES:
            mine = [(which, set(names.split(","))) for k, which, names, _ in cases if k == kind]
            left_out = set.intersection(*(names for which, names in mine if which == "--except"))
            self.assertLessEqual(left_out, set.union(*(names for which, names in mine if which == "--only")))

    def test_the_cpus_side_of_the_twins_can_be_built(self):
        made = subprocess.run(["make", twins.REFERENCE], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stdout + made.stderr)

    def test_an_unknown_stage_is_named(self):
        result = subprocess.run([SCRIPT, "--only", "twins,nonsense"], capture_output=True, text=True)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("nonsense", result.stderr)

    def test_a_report_stays_where_the_other_file_cannot_be_written(self):
        with tempfile.TemporaryDirectory(prefix="commfuse-test-") as folder:
            for name, other in (("report.txt", "commands.log"), ("commands.log", "report.txt")):
                os.mkdir(os.path.join(folder, other))
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write("precious")
                with self.assertRaises(OSError):
                    Check(gpu_check.parse(["--out", folder]))
                self.assertEqual(os.path.getsize(os.path.join(folder, name)), 8)
                os.remove(os.path.join(folder, name))
                os.rmdir(os.path.join(folder, other))

    def test_it_starts_from_any_directory_by_the_standard_library_alone(self):
        folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, folder)
        scripts = os.path.join(folder, "scripts")
        os.mkdir(scripts)
        shutil.copytree(os.path.join(ROOT, "tests", "gpu"), os.path.join(folder, "tests", "gpu"),
                        ignore=shutil.ignore_patterns("__pycache__"))
        for name in "command.py", "run_log.py", "tokens.py", "tables.py", "runner.py":
            shutil.copy(os.path.join(ROOT, "scripts", name), scripts)
        copy = shutil.copy(os.path.join(ROOT, "scripts", "gpu_check.py"), scripts)
        result = subprocess.run([sys.executable, "-E", "-s", "-S", "-B", copy, "--help"], cwd="/", capture_output=True,
                                text=True)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("--budget", result.stdout)

    def test_every_mesh_is_there_once(self):
        for transport, sizes in ("ipc", {2, 4}), ("auto", {2, 4}), ("nccl", {2, 4}):
            mine = ranks.meshes(transport)
            self.assertEqual(len(mine), len(set(mine)))
            self.assertEqual({m.tp * m.dp for m in mine}, sizes)
            self.assertLessEqual({"none", "ring"}, {m.mode for m in mine})
            self.assertEqual(len([m for m in mine if m.mode in ranks.NATIVE]), {"ipc": 10, "auto": 4, "nccl": 10}[transport])
        self.assertEqual({m.mode for m in ranks.meshes("nccl")}, {"none", "slice", "ring", "direct", "ring:2"})

    def test_words_of_a_mesh(self):
        mesh = ranks.mesh_of("ipc", "up 2 4 direct:3 bf16 again")
        self.assertEqual(mesh, ("ipc", "up", 2, 4, "direct:3", "bf16", "again"))
        self.assertEqual(ranks.name_of(mesh), "bf16 up   tp 2 dp 4 ipc direct:3, again")
        self.assertEqual(ranks.mesh_of("auto", "tpsp 2 2 auto"), ("auto", "tpsp", 2, 2, "auto", "fp32", ""))

    def test_the_most_telling_meshes_come_first(self):
        first = [(m.strategy, m.tp, m.dp, m.mode, m.kind) for m in ranks.meshes("nccl")[:5]]
        self.assertEqual(first, [("tpsp", 2, 1, "ring", "fp32"), ("up", 2, 1, "direct", "fp32"),
                                 ("tpsp", 2, 1, "none", "fp32"), ("tpsp", 2, 2, "ring", "fp32"),
                                 ("tpsp", 2, 1, "ring", "bf16")])


class Judgement(unittest.TestCase):
    mesh = ranks.Mesh("ipc", "tpsp", 2, 1, "ring")
    expected = [4.0, 3.0]

    def judge(self, losses, status=0, output="", mesh=mesh, bits=None, seconds=1.0):
        recorder = Recorder()
        steps = [{"loss": loss, "grad_norm": 1.0} for loss in losses]
        ranks.judge_mesh(recorder, mesh, steps, Result(status, output, seconds), self.expected, {} if bits is None else bits)
        self.detail = recorder.details[-1]
        return recorder.verdicts[-1]

    def test_losses_of_one_rank_pass(self):
        self.assertEqual(self.judge([4.00001, 3.00001]), OK)

    def test_other_losses_fail(self):
        for losses in ([4.0, 3.001], [4.0], [], [4.0, float("nan")], [4.0, None]):
            self.assertEqual(self.judge(losses), FAIL, losses)

    def test_direct_or_another_transport_must_give_the_same_bits(self):
        bits = {}
        others = dict(mode="direct"), dict(transport="nccl")
        direct, nccl = (self.mesh._replace(**other) for other in others)
        self.assertEqual(self.judge([4.0, 3.0], bits=bits), OK)
        for other in direct, nccl:
            self.assertEqual(self.judge([4.0, 3.0], mesh=other, bits=bits), OK)
            self.assertEqual(self.judge([4.0, 3.000001], mesh=other, bits=bits), FAIL)
            self.assertIn("DIFFER from ipc ring", self.detail)
        bf16 = self.mesh._replace(kind="bf16")  # has other bits
        self.assertEqual(self.judge([4.0, 3.000001], mesh=bf16, bits=bits), OK)
        self.assertEqual(self.judge([4.0, 3.0], mesh=bf16._replace(again="again"), bits=bits), FAIL)

    def test_a_crash_is_a_failure(self):
        broken = "error: a stream cannot wait for a word of memory\nhint:  use --transport nccl\n"
        self.assertEqual(self.judge([], 1, broken, mesh=self.mesh._replace(mode="none")), FAIL)
        self.assertEqual(self.judge([], -11, "segmentation fault"), FAIL)

    def test_a_time_out_is_a_failure(self):
        self.assertEqual(self.judge([], -9, "error: ended after 25 s", seconds=25), FAIL)

    def test_memory_is_out_only_where_the_program_says_so(self):
        for words in ("no memory: 1.0 MiB for logits; 7.0 MiB are allocated already", "CUDA out of memory. Tried",
                      "out of memory for a stream", "x: unknown (cudaErrorMemoryAllocation)"):
            self.assertRegex("error: rank 0 of 1 (host): " + words, checks.OUT_OF_MEMORY)
        for words in ("an illegal memory access was encountered (cudaErrorIllegalAddress)", "memory for logits"):
            self.assertNotRegex("error: rank 0 of 1 (host): " + words, checks.OUT_OF_MEMORY)


class Meshes(Quiet):
    def ran(self, results):
        """How many meshes are trained where training gives these results, one after another."""
        with mock.patch.object(ranks, "train", side_effect=results) as train:
            ranks.run(self.check)
        return train.call_count

    def test_meshes_for_which_there_is_no_time_are_counted(self):
        good, count = ([{"loss": 4.0, "grad_norm": 1.0}], {}, Result(0, "", 9)), len(ranks.plan())
        self.assertEqual(self.ran([good, good, Late]), 3)
        self.assertEqual(self.check.rows[-1][1:], (f"{count - 2} of {count} meshes", LATE, "not run, time is over"))

    def test_transports_take_turns_after_one_rank(self):
        plan = ranks.plan()
        self.assertEqual([(mesh.tp * mesh.dp, mesh.transport) for mesh in plan[:7]],
                         [*4 * [(1, "auto")], (2, "ipc"), (4, "auto"), (2, "nccl")])
        every = [mesh for transport in ("ipc", "auto", "nccl") for mesh in ranks.meshes(transport)]
        self.assertEqual(sorted(plan[4:]), sorted(every))


class Running(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.log = open(os.path.join(self.folder, "commands.log"), "w+", encoding="utf-8")
        self.addCleanup(self.log.close)
        self.runner = Runner(self.log)

    def read(self, name="commands.log"):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()

    def test_what_a_command_prints_is_on_the_disk_however_the_script_ends(self):
        program = ("import signal, sys; sys.path.insert(0, 'scripts'); from runner import Runner\n"
                   "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it is ignored in a shell's background
                   "Runner(open(sys.argv[1], 'w'), bound=True).run(['sh', '-c', 'echo a finding; sleep 60'])")

        def beside():
            return [name for name in os.listdir(self.folder) if name.startswith("running-")]
        script = subprocess.Popen([sys.executable, "-c", program, self.log.name], cwd=ROOT, stderr=subprocess.DEVNULL)
        self.assertTrue(wait_until(lambda: "a finding\n" in map(self.read, beside())))
        script.send_signal(signal.SIGKILL)
        script.wait()
        self.assertIn("a finding\n", map(self.read, beside()))
        for name in beside():
            os.remove(os.path.join(self.folder, name))
        script = subprocess.Popen([sys.executable, "-c", program, self.log.name], cwd=ROOT, stderr=subprocess.DEVNULL)
        self.assertTrue(wait_until(lambda: "a finding\n" in map(self.read, beside())))
        script.send_signal(signal.SIGINT)
        script.wait()
        self.assertRegex(self.read(), r"(?m)^\$ sh -c .*sleep 60.*\[1 processes, status -9, .* s\]\na finding$")
        self.assertEqual(beside(), [])

    def test_a_rank_that_fails_is_reported_and_the_others_are_ended(self):
        commands = [["sh", "-c", "echo error: no device; exit 3"], ["sleep", "60"]]
        begin = time.monotonic()
        result = self.runner.ranks(commands, [{"RANK": "0"}, {"RANK": "1"}])
        self.assertEqual(result.status, 3)
        self.assertEqual(result.reason, "error: no device")
        self.assertFalse(result.ended)
        self.assertIn("rank 1 did not end by itself", result.output)
        self.assertLess(time.monotonic() - begin, 30)

    def test_the_first_to_fail_is_heard_not_the_first_in_line(self):
        commands = [["sh", "-c", "sleep 5; echo error: rank 1 is gone; exit 1"],
                    ["sh", "-c", "echo error: what was wrong; exit 4"]]
        result = self.runner.ranks(commands, [{}, {}])
        self.assertEqual((result.status, result.reason), (4, "error: what was wrong"))

    def test_a_hang_is_reported_as_such_and_not_by_the_rank_that_was_ended_last(self):
        """Rank 1 says so when it loses its connection to rank 0, as the program does."""
        port = checks.free_port()
        serve = f"import socket, time; c = socket.create_server(('127.0.0.1', {port})).accept(); time.sleep(60)"
        watch = ("import socket, sys, time\ns = socket.socket()\n"
                 f"while s.connect_ex(('127.0.0.1', {port})): time.sleep(0.05); s = socket.socket()\n"
                 "s.recv(1)\n"
                 "print('error: rank 0 is gone', flush=True); sys.exit(1)")
        result = self.runner.ranks([[sys.executable, "-c", serve], [sys.executable, "-c", watch]], [{}, {}], limit=10)
        self.assertTrue(result.ended)
        self.assertNotEqual(result.status, 0)
        self.assertEqual(result.output.splitlines(), ["error: ended after 10 s"])

    def test_a_command_over_its_limit_fails_and_over_the_stage_is_late(self):
        self.assertNotEqual(self.runner.run(["sleep", "60"], limit=0.2).status, 0)
        self.runner.deadline = time.monotonic() + 0.2
        with self.assertRaises(Late):
            self.runner.run(["sleep", "60"])
        with self.assertRaises(Late):
            self.runner.run(["true"])

    def test_a_process_that_cannot_be_ended_holds_nothing_up(self):
        class Stuck(subprocess.Popen):
            def wait(self, timeout=None):
                raise subprocess.TimeoutExpired("stuck", timeout) if timeout else AssertionError("waits for ever")

            def poll(self):
                return None

        stuck = Stuck(["sleep", "60"], start_new_session=True)
        self.addCleanup(lambda: (stuck.kill(), subprocess.Popen.wait(stuck)))
        with mock.patch("subprocess.Popen", return_value=stuck):
            result = self.runner.run(["stuck"], limit=0.2)
        self.assertTrue(result.ended)
        self.assertLess(result.status, 0)

    def test_the_output_of_a_command_cut_short_is_kept(self):
        self.runner.deadline = time.monotonic() + 5
        with self.assertRaises(Late) as late:
            self.runner.run(["sh", "-c", "echo a finding; sleep 60"])
        self.assertIn("a finding", late.exception.args[0].output)

    def test_ranks_know_each_other(self):
        for transport in "nccl", "auto":
            first, second = (checks.environment(rank, 2, 1234, transport) for rank in range(2))
            self.assertEqual((first["RANK"], second["RANK"], first["WORLD_SIZE"]), ("0", "1", "2"))
            self.assertNotEqual(first["NCCL_HOSTID"], second["NCCL_HOSTID"])
        self.assertNotIn("NCCL_HOSTID", checks.environment(0, 2, 1234, "ipc"))

    def test_a_killed_script_leaves_nothing_running(self):
        seconds = f"60.{os.getpid()}"  # by which they are known
        program = ("import signal, sys; sys.path.insert(0, 'scripts'); from runner import Runner\n"
                   "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it is ignored in a shell's background
                   f"Runner(bound=True).ranks(2 * [['sleep', '{seconds}']], [{{}}, {{}}])")
        script = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
        self.assertTrue(wait_until(lambda: running(seconds) >= 2))
        script.send_signal(signal.SIGKILL)
        script.wait()
        self.assertTrue(wait_until(lambda: running(seconds) == 0), "still running")

    def test_a_script_that_gets_a_signal_begins_nothing_more_and_reports_its_findings(self):
        folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, folder)
        begun = os.path.join(folder, "begun")
        program = f"""
import concurrent.futures, sys
sys.path.insert(0, "scripts")
import gpu_check

def run(check):
    check.verdict("a thing", "ok")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        work = ["sh", "-c", "echo >> {begun}; sleep 60"]
        for future in [pool.submit(check.runner.run, work) for _ in range(5)]:
            future.result()

gpu_check.STAGES = dict(device=(run, 540))
sys.argv[1:] = ["--out", "{folder}"]
sys.exit(gpu_check.main())"""
        for number in signal.SIGTERM, signal.SIGINT:
            script = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            self.assertTrue(wait_until(lambda: os.path.exists(begun)))
            script.send_signal(number)
            printed, _ = script.communicate(timeout=30)
            self.assertEqual(script.returncode, 128 + number)
            self.assertEqual(printed.splitlines()[-1], "1 ok, 0 failed, 0 late, 0 skipped")
            self.assertEqual(os.path.getsize(begun), 1)
            with open(os.path.join(folder, "report.txt"), encoding="utf-8") as file:
                self.assertEqual([line.split() for line in file if "a thing" in line], [["ok", "a", "thing"]])
            os.remove(begun)


def running(argument):
    """How many processes sleep that long."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            found += file.read().split(b"\0")[:2] == [b"sleep", argument.encode()]
    return found


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


class Stages(Quiet):
    def run_stage(self, run, name="test"):
        with contextlib.redirect_stderr(io.StringIO()), mock.patch.dict(gpu_check.STAGES, {name: (run, 10)}):
            gpu_check.run_stage(self.check, name, 10)
        return self.verdicts()[-1]

    def test_a_stage_that_is_late_leaves_its_partial_table(self):
        def late(check):
            check.runner.deadline = time.monotonic() + 2
            check.show_run("a table", check.runner.run(["sh", "-c", "echo | a row |; sleep 60".replace("|", "'|'")]))
        self.assertEqual(self.run_stage(late), LATE)
        with open(self.check.report.name, encoding="utf-8") as file:
            self.assertIn("        | a row |\n", file.read())

    def test_products_of_many_shapes_take_the_first_algorithm(self):
        for name in gpu_check.STAGES:
            words = ["sh", "-c", "echo ${COMMFUSE_FIRST_ALGORITHM-all}"]
            self.run_stage(lambda check, words=words: check.show_run("", check.runner.run(words)), name)
            with open(self.check.report.name, encoding="utf-8") as file:
                said = file.read().splitlines()[-2].strip()
            self.assertEqual(said, "1" if name in ("ranks", "others", "sanitizer") else "all", name)

    def test_a_stage_that_is_late_is_no_failure_unless_all_others_need_it(self):
        def late(_):
            raise Late
        self.assertEqual(self.run_stage(late), LATE)
        self.assertEqual(self.run_stage(late, "build"), FAIL)

    def test_a_sanitizer_that_does_not_know_the_device_is_left_out(self):
        for output, verdict in (("Error: Device not supported. Please refer to", SKIP), ("ERROR SUMMARY: 1 error", FAIL)):
            twins.judge(self.check, "memcheck", Result(1, "========= " + output, 1))
            self.assertEqual(self.verdicts()[-1], verdict, output)

    def test_a_sanitizer_that_is_cut_short_has_found_what_it_has_found(self):
        for line, verdict in (("========= Invalid __global__ write of size 4 bytes", FAIL), ("========= COMPUTE-SANITIZER", LATE),
                              ("========= Error: Race reported between Write access", FAIL), ("", LATE)):
            result = Result(-9, f"error: ended after 35 s\n{line}\n=========     at 0x80\n", 35)
            twins.judge(self.check, "memcheck", result, late=True)
            self.assertEqual(self.verdicts()[-1], verdict, line)
            self.assertEqual(line in self.check.rows[-1][3], verdict == FAIL or not line)


class Files(Quiet):
    def test_a_torn_line_of_a_log_ends_it(self):
        for line, count in ("false", 0), ("""printf '{"event":"config"}\\n{"event":"step","step":0,"loss":4}\\n{"event":"st' >$2""", 1):
            self.program("#!/bin/sh\n{line}\nexit 1\n".replace("{line}", line))
            steps, config, result = checks.train(self.check, "bf16")
            self.assertEqual((len(steps), len(config), result.status), (count, count, 1))

    def test_tokens_are_as_uneven_as_words(self):
        path, count = os.path.join(self.folder, "tokens.bin"), 100000
        write_tokens(path, count, 50257)
        with open(path, "rb") as file:
            header, tokens = file.read(1024), file.read()
        self.assertEqual([int.from_bytes(header[i:i + 4], "little") for i in (0, 4, 8)], [20240520, 1, count])
        self.assertEqual(len(tokens), 2 * count)
        counts = collections.Counter(tokens[i] + 256 * tokens[i + 1] for i in range(0, len(tokens), 2))
        self.assertLess(max(counts), 50257)
        self.assertTrue(0.03 < counts.most_common(1)[0][1] / count < 0.08, counts.most_common(3))
        self.assertGreater(len(counts), 2000)

    def test_paths_are_never_given_twice(self):
        paths, threads = [], []
        for _ in range(8):
            threads.append(threading.Thread(target=lambda: paths.extend(self.check.path("x") for _ in range(200))))
            threads[-1].start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(paths)), 1600)


class Loss:
    """A model's result, as tests/bench/torch_gpt.py uses it."""

    def __init__(self, value, backward):
        self.value, self.values = value, backward

    def __truediv__(self, count):
        return Loss(self.value / count, self.values)

    def backward(self):
        self.values.append(self.value)

    def detach(self):
        return self.value


class Torch(unittest.TestCase):
    def setUp(self):
        """The program, where PyTorch is a name only."""
        torch = mock.MagicMock()
        torch.nn.Module = object
        names = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
        with mock.patch.dict(sys.modules, names):
            path = os.path.join(ROOT, "tests", "bench", "torch_gpt.py")
            spec = importlib.util.spec_from_file_location("torch_gpt", path)
            self.program = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.program)

    def test_gradients_of_all_micro_batches_make_one_update(self):
        backward, optimizer = [], mock.MagicMock()
        with mock.patch.object(self.program, "optimizer_of", lambda _: optimizer):
            times, loss = self.program.train(mock.MagicMock(), lambda x, y: Loss(x + y, backward),
                                             [1, 2, 5], [0, 2, 2], steps=2)
        self.assertEqual((len(times), loss), (2, 4.0))
        self.assertEqual(backward, 2 * [1 / 3, 4 / 3, 7 / 3])
        self.assertEqual((optimizer.step.call_count, optimizer.zero_grad.call_count), (2, 2))


class Times(Quiet):
    """The order of the runs and their report, where runs take no time."""

    def setUp(self):
        super().setUp()
        self.runs, self.full = [], {}

    def our_time(self, check, model, step, tokens):
        self.runs.append(("ours", model.name, step))
        if (model.name, step.batch) in self.full:
            return None, Result(1, self.full[model.name, step.batch], 1)
        row = dict(model=model.name, program="commfuse", batch=step.batch,
                   accumulation=step.accumulation, steps=step.repeated[1], losses=[11.0, 10.0],
                   step_ms=10.0 * step.accumulation, spread=0,
                   tokens_per_s=1000.0 * min(step.batch, 32), mfu=0.4, memory_mib=None,
                   peak_tflops=1000)
        return row, Result(0, "", 1)

    def torch_time(self, check, model, step, peak):
        self.runs.append(("torch", model.name, step))
        row = dict(model=model.name, program="torch", batch=step.batch, accumulation=step.accumulation, steps=12,
                   step_ms=20.0 + 10 * step.accumulation, spread=0, tokens_per_s=1.0, mfu=0.2,
                   memory_mib=2048, framework="torch 2", compiled="blocks", graphs=2)
        return row, Result(0, "", 1)

    def stage(self):
        self.check.runner.printed = lambda *_: "2.11"  # PyTorch's version
        with mock.patch.multiple(times, write_tokens=self.write_tokens, measure=self.our_time, measure_torch=self.torch_time):
            times.run(self.check)

    def write_tokens(self, path, count, vocabulary):
        self.tokens = count

    def names_of(self, runs):
        return list(dict.fromkeys(name for _, name, _ in runs))

    def test_steps_of_d12_have_the_same_losses_twice(self):
        def other_time(check, model, step, tokens):
            row, result = self.our_time(check, model, step, tokens)
            row["losses"].append(len(self.runs))
            return row, result
        for measure, verdict in (self.our_time, OK), (other_time, FAIL):
            self.runs.clear()
            with mock.patch.multiple(times, write_tokens=self.write_tokens, measure=measure):
                times.steps(self.check)
            self.assertEqual([(name, step.batch, sum(step.repeated)) for _, name, step in self.runs],
                             [("d12", 32, 60), ("d48", 8, 20), ("d12", 32, 60)])
            self.assertEqual(self.verdicts()[-1], verdict)
        self.runs.clear()
        with mock.patch.multiple(times, write_tokens=self.write_tokens, measure=self.our_time):
            gpu_check.STAGES["accumulation"][0](self.check)
        self.assertEqual([(name, step.batch, step.accumulation, step.repeated) for _, name, step in self.runs],
                         [("d12", 32, 4, (2, 5)), ("d48", 8, 4, (2, 5)), ("d12", 32, 4, (2, 5))])
        self.assertGreater(self.tokens, 4 * 32 * 1024)
        self.full = {("d12", 32): "error: broken"}
        with mock.patch.multiple(times, write_tokens=self.write_tokens, measure=self.our_time):
            times.steps(self.check)
        self.assertEqual(self.verdicts()[-1], FAIL)

    def test_pytorch_comes_after_all_of_ours_and_each_beside_one_of_ours(self):
        self.stage()
        first = next(i for i, run in enumerate(self.runs) if run[0] == "torch")
        order = ["d12", "d48", "d24", "d36"]
        self.assertEqual(self.names_of(self.runs[:first]), order)
        after = self.runs[first:]
        self.assertEqual([run[:2] for run in after],
                         [(who, name) for name in [*order, *order[:2]] for who in ("torch", "ours")])
        self.assertTrue(all(a[2] == b[2] for a, b in zip(after[::2], after[1::2])), "other steps")
        self.assertEqual([run[2].accumulation for run in after[::2]], [1, 1, 1, 1, 4, 4])
        self.assertEqual(self.check.torch_over_ours, {1: dict.fromkeys(order, 3.0), 4: dict.fromkeys(order[:2], 1.5)})

    def test_steps_of_several_micro_batches_come_after_all_of_one_and_before_pytorch(self):
        self.stage()
        mine = self.runs[:next(i for i, run in enumerate(self.runs) if run[0] == "torch")]
        kinds = [step.accumulation for _, _, step in mine]
        self.assertEqual(set(kinds), {1, 4})
        self.assertEqual(kinds, sorted(kinds), "mixed")
        self.assertEqual([(name, step.batch) for _, name, step in mine if step.accumulation == 4],
                         [("d12", 32), ("d48", 16), ("d24", 32), ("d36", 32)])  # the best of each search
        self.assertGreater(self.tokens, max(step.tokens for _, _, step in self.runs))

    def test_a_model_of_which_no_micro_batch_runs_has_no_step_of_several(self):
        self.full = {("d24", 8): "error: broken"}
        self.stage()
        self.assertEqual([name for who, name, step in self.runs if who == "ours" and step.accumulation == 4],
                         ["d12", "d48", "d36", "d12", "d48"])

    def test_a_step_of_several_micro_batches_is_asked_for_and_counted_whole(self):
        self.program(f"#!{sys.executable}\n" '''
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(words["--log"], "w") as log:
    print(json.dumps({"event": "config", "peak_tflops_all_ranks": 1000}), file=log)
    for step in range(int(words["--steps"])):
        print(json.dumps({"event": "step", "step": step, "loss": 11 - 0.1 * step, "step_ms": 500 if step < 2 else 1000, "mfu": 0.5}), file=log)
print("memory    1536.0 MiB per rank, of 2048.0 MiB that are free", file=sys.stderr)
print(json.dumps(words))
''')
        for step, sequences, steps in (times.Step(8), "8", 17), (times.Step(8, 4), "32", 7):
            row, result = times.measure(self.check, times.MODELS[1], step, "tokens")
            words = json.loads(result.output.splitlines()[0])
            self.assertEqual((words["--batch"], words["--micro-batch"], words["--recompute"]), (sequences, "8", "0"))
            self.assertEqual((words["--model"], words["--steps"]), ("d48", str(steps)))
            self.assertEqual((row["batch"], row["accumulation"], row["step_ms"]), (8, step.accumulation, 1000))
            self.assertEqual(row["tokens_per_s"], 8 * step.accumulation * 1024)
            self.assertEqual((row["mfu"], row["spread"]), (0.5, 0))  # of the timed steps alone
            self.assertEqual(row["memory_mib"], 1536)

    def test_a_step_that_is_not_the_libraries_fails(self):
        """By the notes as the sources have them."""
        folder, notes, prefix = os.path.join(ROOT, "layers", "kernels"), [], ""
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            value = re.search(r'#define SLOWER_NOTE (".*?")', text)
            self.assertEqual(value is not None, name == "kernel.h")
            self.assertNotRegex(text.replace(value[0], "") if value else text, '"note:')
            notes += re.findall(r'fprintf\(stderr,\s+SLOWER_NOTE "(.*)\\n"', text)
            prefix = json.loads(value[1]) if value else prefix
        self.assertEqual(len(notes), 2)
        for note in [prefix + note for note in notes]:
            self.program(f"""#!{sys.executable}
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print({note!r}, file=sys.stderr)
with open(words["--log"], "w") as log:
    for step in range(int(words["--steps"])):
        print(json.dumps(dict(event="step", step=step, loss=11 - 0.1 * step, step_ms=1, mfu=0.5)), file=log)
""")
            row, _ = times.measure(self.check, times.MODELS[0], times.Step(8), "tokens")
            self.assertTrue(row)
            self.assertEqual((self.verdicts()[-1:], self.check.rows[-1][3] if self.check.rows else ""), ([FAIL], note))
            self.check.rows.clear()

    def test_steps_that_compute_nonsense_are_no_figure(self):
        self.assertEqual(times.implausible([11.1, 12.0, 9.5]), "")
        for losses, why in (([11.0, float("nan"), 9.0], "not finite"), ([11.0, None, 9.0], "not finite"),
                            ([0.0, 0.0], "first loss"),
                            ([5.0, 4.0], "first loss"), ([10.9, 10.9], "not fallen"), ([10.9, 11.0], "not fallen")):
            self.assertIn(why, times.implausible(losses))
        self.program(f"#!{sys.executable}\n" '''
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(words["--log"], "w") as log:
    for step in range(int(words["--steps"])):
        print(json.dumps({"event": "step", "step": step, "loss": 3 - 0.1 * step, "step_ms": 1, "mfu": 0.5}), file=log)
''')
        row, result = times.measure(self.check, times.MODELS[0], times.Step(8), "tokens")
        self.assertIsNone(row)
        self.assertIn("error: the first loss is 3.0000", result.reason)

    def test_a_large_micro_batch_is_held_against_several_small_ones(self):
        for wrong, verdict in ((0, OK), (0.1, FAIL)):
            found = {64: [11, 10, 9], 16: [11, 10, 9 + wrong]}

            def train(check, kind, found=found, **options):
                self.assertEqual(options["batch"], 64)
                steps = [{"loss": loss, "grad_norm": 1.0} for loss in found[options["micro_batch"]]]
                return steps, {}, Result(0, "", 1)
            with mock.patch.object(losses, "train", train), mock.patch.object(losses, "write_tokens"):
                losses.large_against_parts(self.check)
            self.assertEqual(self.verdicts()[-1], verdict)

    def test_pytorch_is_asked_for_the_same_step(self):
        answer = json.dumps(dict(tokens_per_s=2e5, flops_per_token=1e9, batch=32, allocated_mib=512))
        python = self.script("python", f"#!/bin/sh\necho \"$*\"\necho '{answer}'\n")
        with mock.patch.object(times, "PYTHON", python):
            row, result = times.measure_torch(self.check, times.MODELS[0], times.Step(32, 4), 1000)
        self.assertIn("torch_gpt.py 12 768 12 32 1024 ", result.output)
        self.assertIn(" --steps 5 --warmup 2 --accumulate 4", result.output)
        self.assertEqual((row["program"], row["batch"], row["accumulation"]), ("torch", 32, 4))
        self.assertEqual((row["memory_mib"], row["mfu"]), (512, 0.2))

    def test_kernels_are_shown(self):
        self.program("#!/bin/sh\necho fc forward $*\n")
        with mock.patch.object(self.check, "show") as show:
            times.kernels(self.check)
        self.assertEqual([row[1:3] for row in self.check.rows], [("d12: kernels timed", OK), ("d48: kernels timed", OK)])
        self.assertEqual(show.call_args_list[1][0][0], ["fc forward 48 1600 25 8 1024 50304 10"])

    def test_larger_batches_are_tried_until_they_do_not_pay(self):
        self.stage()
        self.assertEqual([step.batch for _, name, step in self.runs if name == "d12"][:3], [16, 32, 64])
        self.assertNotIn(128, [step.batch for _, _, step in self.runs])

    def test_full_memory_ends_the_search_and_an_illegal_access_fails(self):
        self.full = {("d24", 16): "error: no memory: 9 MiB for logits",
                     ("d36", 16): "error: an illegal memory access was encountered"}
        self.stage()
        verdicts = {row[1]: row[2] for row in self.check.rows if "micro-batch" in row[1]}
        self.assertEqual(verdicts["d24, micro-batch 16"], SKIP)
        self.assertEqual(verdicts["d36, micro-batch 16"], FAIL)

    def test_time_that_ends_leaves_out_what_counts_least(self):
        def until_several(check, model, step, tokens):
            if step.accumulation == 4 and model.name == "d24":
                raise Late
            return take(check, model, step, tokens)
        take, self.our_time = self.our_time, until_several
        with self.assertRaises(Late):
            self.stage()
        self.assertEqual(self.names_of(self.runs), ["d12", "d48", "d24", "d36"])
        self.assertEqual([run[:2] for run in self.runs[-2:]], [("ours", "d12"), ("ours", "d48")])

    def test_failures_and_the_table_come_last(self):
        self.stage()
        for i in range(300):
            self.check.verdict(f"a check {i}", FAIL, "a word of it " * 40)
        text = gpu_check.summary(self.check)
        self.assertLess(text.index("a check 299"), text.index("mem GiB"))
        self.assertIn("| d36 | torch |", text[text.index("mem GiB"):])
        self.assertIn("n/a", text[text.index("mem GiB"):])  # unknown memory
        self.assertRegex(text, r"(?m)^\| d48 \| torch \| 8 \| 4 \| ")
        self.assertIn("accum: micro-batches of a step", text)
        self.assertIn("PyTorch's step over ours: d12 3.00", text)
        self.assertIn("PyTorch's step over ours, 4 micro-batches a step: d12 1.50, d48 1.50", text)
        self.assertRegex(text.splitlines()[-1], r"^\d+ ok, 300 failed")
