"""tool_twins writes the same outputs whatever the number of threads, products to rounding, and the same to rounding with
elements of bf16; compare_twins.py finds errors.

quick: agrees found threads_change nan both_ways short rounded
limit: 300
make: bf16-tools
"""
import array
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
import compare_twins
from processor import needs_bf16

BUILD = os.environ.get("BUILD", "build/release")
TOOL = os.path.join(BUILD, "tests", "layers", "kernels", "tool_twins")
NEAREST = 0.999
ATTENTION_OFF = {"attention_forward": 2.3e-3, "attention_backward": 2.6e-3, "attention_backward_apart": 7e-3}
TOOL_BF16 = os.path.join(BUILD, "bf16", "tests", "layers", "kernels", "tool_twins")


class Twins(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.two = cls.write("two.bin", "--threads", "2", "--repeat")

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder.name, name)

    @classmethod
    def write(cls, name, *words):
        subprocess.run([TOOL, cls.path(name), "--small", *words], check=True, stdout=subprocess.DEVNULL)
        return cls.path(name)

    def compare(self, found, expected):
        script = os.path.join(HERE, "compare_twins.py")
        return subprocess.run([sys.executable, script, found, expected], capture_output=True, text=True)

    def planted(self, change):
        """The file with one record changed: change(record's head, its bytes) gives the new ones, None drops it."""
        path, done = self.path("planted.bin"), False
        with open(self.two, "rb") as source, open(path, "wb") as target:
            target.write(source.readline())
            while line := source.readline():
                head = json.loads(line)
                data = source.read(head["count"] * int(head["type"][1]))
                if not done and head["function"] == "linear_dgrad" and head["count"] > 1000:
                    done, changed = True, change(head, data)
                    if changed is None:
                        continue
                    head, data = changed
                target.write(json.dumps(head).encode() + b"\n" + data)
        self.assertTrue(done, "no record to change")
        return self.compare(path, self.two)

    @staticmethod
    def records(path):
        """Head and bytes of each."""
        with open(path, "rb") as source:
            source.readline()
            while line := source.readline():
                head = json.loads(line)
                yield head, source.read(head["count"] * int(head["type"][1]))

    def test_threads_change_no_bit(self):
        """But of the library's products, which it may add up in another order: its kernels for AVX2 do."""
        one, alike, products = self.write("one.bin", "--threads", "1"), 0, 0
        for (head, a), (other, b) in itertools.zip_longest(self.records(one), self.records(self.two),
                                                           fillvalue=(None, None)):
            self.assertEqual(head, other)
            if head["function"].startswith("linear_") and head["function"] != "linear_bias_grad":
                products += 1
                found, expected = (array.array({"f4": "f", "f8": "d"}[head["type"]], data) for data in (a, b))
                scale = max(map(abs, expected), default=0)
                self.assertLessEqual(max((abs(x - y) for x, y in zip(found, expected)), default=0), 1e-6 * scale, head)
            else:
                alike += 1
                self.assertEqual(a, b, head)
        self.assertGreater(alike, 100)
        self.assertGreater(products, 10)

    def write_bf16(self, name, *words):
        result = subprocess.run([TOOL_BF16, self.path(name), "--round", *words], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return self.path(name)

    @needs_bf16
    def test_elements_of_bf16(self):
        half = self.write_bf16("half.bin", "--repeat", "--threads", "2")
        subprocess.run([TOOL, self.path("whole.bin"), "--round"], check=True, stdout=subprocess.DEVNULL)
        result = self.compare(half, self.path("whole.bin"))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn(" 0 do not", result.stdout)
        self.assertIn("inputs rounded to bf16", result.stdout)

    @needs_bf16
    def test_results_are_the_nearest_of_bf16(self):
        """Results rounded once from the same sums are nearly always the nearest bf16 to fp32's; attention, which also rounds
        in between, is nearly as close."""
        numpy = compare_twins.numpy
        if numpy is None:
            self.skipTest("no numpy")
        half = self.write_bf16("half.bin", "--threads", "2")
        subprocess.run([TOOL, self.path("whole.bin"), "--round"], check=True, stdout=subprocess.DEVNULL)
        (_, found), (_, expected) = (compare_twins.read_records(path) for path in (half, self.path("whole.bin")))
        sums = {}  # by function: elements, those that are the nearest, squares of what is off, of what is expected
        for key, (kind, data, real) in found.items():
            if not real:
                continue
            a, b = (numpy.frombuffer(bytes_of, "<f4") for bytes_of in (data, expected[key][1]))
            bits = b.view("<u4").astype("<u8")
            nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
            sums.setdefault(key[0], numpy.zeros(4))[:] += (a.size, (a == nearest).sum(), ((a - b).astype(float) ** 2).sum(),
                                                           (b.astype(float) ** 2).sum())
        for function, (count, nearest, off, whole) in sums.items():
            with self.subTest(function=function, elements=count, nearest=nearest / count, off=(off / whole) ** 0.5):
                if function.startswith("attention_"):
                    self.assertLess((off / whole) ** 0.5, ATTENTION_OFF[function])
                elif function != "cf_add_parts" and not re.match("linear_.*gelu", function):  # these round on their way, too
                    self.assertGreater(nearest / count, NEAREST)
        self.assertGreater(len(sums), 15)
        print({f: (round(n / c, 5), round(float((o / w) ** 0.5), 5)) for f, (c, n, o, w) in sums.items()})

    @needs_bf16
    def test_threads_change_no_bit_of_bf16(self):
        one, two = (self.write_bf16(f"{n}.bin", "--small", "--threads", str(n)) for n in (1, 2))
        for (head, a), (other, b) in itertools.zip_longest(self.records(one), self.records(two), fillvalue=(None, None)):
            self.assertEqual(head, other)
            if not head["function"].startswith("linear_") or head["function"] == "linear_bias_grad":
                self.assertEqual(a, b, head)

    def test_a_file_agrees_with_itself(self):
        result = self.compare(self.two, self.two)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn(" 0 do not", result.stdout)

    def test_rounded_inputs_are_other_inputs(self):
        rounded = self.write("rounded.bin", "--round")
        self.assertNotEqual(self.compare(rounded, self.two).returncode, 0)

    def test_one_wrong_element_is_found(self):
        result = self.planted(lambda head, data: (head, data[:400] + b"\x00\x00\x80\x3f" + data[404:]))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("1 do not", result.stdout)
        self.assertIn("FAIL linear_dgrad", result.stdout)

    def test_nan_never_passes(self):
        result = self.planted(lambda head, data: (head, data[:400] + b"\xff\xff\xff\xff" + data[404:]))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("NaN", result.stdout)

    def test_a_nan_in_both_does_not_pass(self):
        self.planted(lambda head, data: (head, data[:400] + b"\xff\xff\xff\xff" + data[404:]))
        result = self.compare(self.path("planted.bin"), self.path("planted.bin"))
        self.assertEqual(result.returncode, 1, result.stdout)

    def test_a_missing_output_is_found(self):
        result = self.planted(lambda head, data: None)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("only in one of the files", result.stdout)

    def test_a_short_output_is_found(self):
        result = self.planted(lambda head, data: (dict(head, count=head["count"] - 1), data[:-4]))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("expected", result.stdout)

    def test_both_ways_to_compare_agree(self):
        if compare_twins.numpy is None:
            self.skipTest("no numpy")
        _, records = compare_twins.read_records(self.two)
        for (kind, data, real) in [r for r in records.values() if 20 < compare_twins.count(r) < 2000][:40]:
            other = kind, data[4:] + data[:4], real
            for a, b in zip(compare_twins.errors_numpy(other, (kind, data, real)),
                            compare_twins.errors_plain(other, (kind, data, real))):
                self.assertTrue(a == b or abs(a / b - 1) < 1e-6, (a, b))
