"""The tree is as README describes it: twins have the same functions in the same order, arrows point down only, and only named
files know MPI, CUDA or NCCL.
"""
import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = {"commfuse": ("base", "launch", "cpu", "gpu", "predict"), "data": ("run",), "layers": ("kernels", "optimizer")}
FOLDERS = "commfuse", "layers", "data", *(f"{folder}/{room}" for folder, rooms in ROOMS.items() for room in rooms)
CORE = {"commfuse", "commfuse/base"}
BELOW = {"commfuse/base": set(), "commfuse": CORE, "commfuse/launch": CORE, "commfuse/cpu": CORE | {"commfuse/launch"},
         "commfuse/gpu": CORE | {"commfuse/launch"}, "commfuse/predict": CORE, "data": CORE, "data/run": {name for name in FOLDERS if not name.startswith("layers")},
         "layers/kernels": CORE, "layers/optimizer": CORE | {"layers/kernels"},
         "layers": CORE | {"layers/kernels", "layers/optimizer"}, "": set(FOLDERS)}  # "": train_gpt.cu
# Declarations: of tensors' order and shape, of the policy; a kernel's includes; what predicted kernels write.
ACROSS = {("data", "layers/params.h"), ("layers/optimizer", "layers/params.h"), ("layers/optimizer", "layers/overlap.h"),
          ("layers/kernels", "commfuse/gpu/cuda.h"), ("layers/optimizer", "layers/random.h"),
          ("layers", "commfuse/predict/record.h"), ("data/run", "layers/optimizer/optimizers.h")}
LIBRARIES = {r"\bMPI_\w+|\bmpi\.h": {"commfuse/cpu/transport_mpi.c", "commfuse/cpu/inflight_mpi.c", "commfuse/cpu/inflight_mpi.h",
                                     "commfuse/launch/bootstrap_mpi.c"},
             r"\bnccl[A-Z]\w+|\bnccl\.h": {"commfuse/gpu/transport_nccl.cu"},
             r"\bcudnn[A-Z_]\w+|\bcudnn\.h": {"layers/kernels/attention_cudnn.cu"},
             r"\bcublas\w+": {"layers/kernels/linear.cu"}}
CUDA_HEADERS = "commfuse/gpu/cuda.h", "commfuse/gpu/transport_cuda.h", "layers/kernels/kernel.h"


class Help(unittest.TestCase):
    def test_is_printed_wherever_a_script_is_called_from(self):
        for name in "install_deps.sh", "test.sh":
            for folder, command in ((ROOT, f"scripts/{name}"), (ROOT / "scripts", f"./{name}"), ("/", ROOT / "scripts" / name)):
                with self.subTest(command=command):
                    done = subprocess.run([command, "--help"], cwd=folder, capture_output=True, text=True)
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    self.assertIn(f"scripts/{name}", done.stdout)

    def test_a_python_that_is_too_old_says_so(self):
        """In words: it can read the script, and command.py before any other part. Where there is one, it is asked."""
        paths = (path for pattern in ("scripts/mfu_sweep", "scripts/*.py", "data/*.py", "tests/*.py", "tests/bench/*.py")
                 for path in sorted(ROOT.glob(pattern)) if os.access(path, os.X_OK) and "torch" not in path.name)
        started = [*(str(path.relative_to(ROOT)) for path in paths), "scripts/gpu_check.py", "tests/run.py"]
        self.assertGreater(len(started), 10)
        old = [python for python in map(shutil.which, ("python3.6", "python3.7", "python3.8"))
               if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0]
        pretend = "import runpy, sys; sys.version_info, sys.argv = (3, 8, 1), sys.argv[1:]; runpy.run_path(sys.argv[0])"
        for name in [*started, "scripts/command.py"]:
            ast.parse((ROOT / name).read_text(), feature_version=(3, 6))
        for folder in "scripts", "data", "tests":
            for path in (ROOT / folder).rglob("*.py"):
                self.assertNotRegex(path.read_text(), r"zip\(.*\bstrict=", f"{path}: of Python 3.10")
        for command in [[sys.executable, "-c", pretend], *([python] for python in old)]:
            for name in started:
                with self.subTest(command=command, name=name):
                    done = subprocess.run([*command, name, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60,
                                          env=os.environ | {"PYTHONPATH": str((ROOT / name).parent)})
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertRegex(done.stderr, r"\Aerror: Python 3\.9 or later is needed; .*\nhint:  .*\n\Z")
        found = subprocess.run(["scripts/find_python.sh"], cwd=ROOT, capture_output=True, text=True, check=True,
                               env=os.environ | ({"PYTHON": old[-1]} if old else {})).stdout.strip()
        self.assertNotIn(found, old)


def code(name):
    """Without comments and strings."""
    text = (ROOT / name).read_text()
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"(?<!\.h")', "", text, flags=re.DOTALL)


def sources(*folders):
    return [f"{folder}/{path.name}" for folder in folders for path in sorted((ROOT / folder).iterdir())
            if path.suffix in (".c", ".h", ".cu")]


def declared(name):
    """Functions of a header, in order."""
    return re.findall(r"^(?!typedef|#|static)[\w \t*]*?\b(\w+)\([^;{}]*\)(?: CF_\w+\([^;]*\))?;", code(name), re.MULTILINE)


def defined(name, of):
    """Those of them that a file defines, in order."""
    found = re.findall(r"^(?!static|[A-Z]+\()[\w \t*]*?\b(\w+)\([^;{}]*\)\s*\{", code(name), re.MULTILINE)
    return [function for function in found if function in of]


class Twins(unittest.TestCase):
    def check(self, header, *twins):
        functions = declared(header)
        self.assertTrue(functions, header)
        orders = [defined(twin, functions) for twin in twins]
        self.assertEqual(orders[0], orders[1], f"{twins[0]} and {twins[1]}: functions of {header}")
        self.assertEqual(sorted(orders[0]), sorted(functions), f"{twins[0]} defines what {header} declares")

    def test_layers(self):
        twins = [name[:-3] for name in sources("layers/kernels", "layers/optimizer") if name.endswith(".cu") and os.path.exists(ROOT / f"{name[:-3]}.c")]
        self.assertGreater(len(twins), 6)
        for name in twins:
            with self.subTest(layer=name):
                self.check(f"{name}.h", f"{name}.c", f"{name}.cu")

    def test_what_has_loops_has_a_twin(self):
        """Without one, the GPU program would be linked with loops of the host over the device's memory."""
        for name in sources("layers", "layers/kernels", "layers/optimizer"):
            if name.startswith("layers/kernels/gemm") or name == "layers/params.c":  # products are libraries'; initial weights the host's
                continue
            if name.endswith(".c") and "#pragma omp" in (ROOT / name).read_text():
                with self.subTest(layer=name):
                    self.assertTrue(os.path.exists(ROOT / f"{name[:-2]}.cu"))

    def test_one_place_for_the_activation(self):
        users = [name for name in sources("layers/kernels") if re.search(r"0\.044715|1\.59576", code(name))]
        self.assertEqual(users, ["layers/kernels/activation.h"])
        for twin in "layers/kernels/elementwise.c", "layers/kernels/elementwise.cu":
            for function in "activation", "activation_slope":
                self.assertEqual(len(re.findall(rf"\b{function}\(", code(twin))), 1, f"{twin} calls {function}() once")

    def test_devices(self):
        self.check("commfuse/device.h", "commfuse/cpu/device_cpu.c", "commfuse/gpu/device_cuda.cu")
        recorded = re.findall(r"^#define RECORDED_(\w+)", (ROOT / "commfuse/predict/recorder.c").read_text(), re.MULTILINE)
        self.assertEqual(recorded, defined("commfuse/cpu/device_cpu.c", recorded))


class Tests(unittest.TestCase):
    def test_are_in_the_room_of_what_they_test(self):
        rooms = {os.path.basename(name).partition(".")[0]: os.path.dirname(name) for name in sources(*FOLDERS)}
        rooms["transport"] = "commfuse/cpu"  # of a device, by itself
        for path in sorted((ROOT / "tests").rglob("test_*.*")):
            room, name = str(path.parent.relative_to(ROOT / "tests")), path.stem[len("test_"):]
            if name in rooms and room.partition("/")[0] == rooms[name].partition("/")[0]:
                with self.subTest(test=path.name):
                    self.assertEqual(room, rooms[name])


class Arrows(unittest.TestCase):
    def test_they_point_down(self):
        for name in [*sources(*FOLDERS), "train_gpt.cu"]:
            folder = os.path.dirname(name)
            for include in re.findall(r'^#include "([^"]+)"', (ROOT / name).read_text(), re.MULTILINE):
                with self.subTest(file=name, include=include):
                    here = os.path.normpath(os.path.join(folder, include))
                    self.assertTrue(os.path.exists(ROOT / here), "is included by its place beside the file")
                    if (folder, here) not in ACROSS:
                        self.assertIn(os.path.dirname(here), BELOW[folder] | {folder})

    def test_libraries_are_known_in_one_place(self):
        for pattern, allowed in LIBRARIES.items():
            users = {name for name in [*sources(*FOLDERS), "train_gpt.cu"] if re.search(pattern, code(name))}
            self.assertEqual(users, allowed, pattern)

    def test_messages_of_the_library_name_no_option_of_the_trainer(self):
        options = set(re.findall(r'^[A-Z]+\(\w+, "([a-z0-9-]+)"', (ROOT / "data/run/option_list.h").read_text(), re.MULTILINE))
        self.assertGreater(len(options), 40)
        for name in sources("commfuse", *(f"commfuse/{room}" for room in ROOMS["commfuse"])):
            text = re.sub(r"//[^\n]*", "", (ROOT / name).read_text())
            said = {option for string in re.findall(r'"((?:\\.|[^"\\\n])*)"', text) for option in re.findall(r"--([a-z-]+)", string)}
            with self.subTest(file=name):
                self.assertEqual(said & options, set())

    def test_what_is_printed_goes_through_one_filter(self):
        for name in [*sources("data", "data/run"), "train_gpt.cu"]:
            manifest = r"\bfprintf\(out," if name == "data/checkpoint.c" else "$^"  # written into memory
            with self.subTest(file=name):
                self.assertNotRegex(re.sub(manifest, "", code(name)), r"\b(v?f?printf|f?puts|perror)\(", "cf_print() is for that")

    def test_cuda_is_for_twins_and_transports(self):
        for name in [*sources(*FOLDERS), "train_gpt.cu"]:
            if name.endswith(".cu") and name != "train_gpt.cu" or name in CUDA_HEADERS:
                continue
            with self.subTest(file=name):
                self.assertIsNone(re.search(r"\bcuda[A-Z]\w+|\bcuda_runtime|<<<|__global__", code(name)))

    def test_schedules_and_executor_know_no_device(self):
        for name in ("schedule.c", "schedule.h", "fuse.c", "fuse.h"):
            self.assertNotRegex(code(f"commfuse/{name}"), r"(?i)\bcuda|\bnccl|\bMPI_|#if(?!n?def (CF_\w+_H|__cplusplus))")
