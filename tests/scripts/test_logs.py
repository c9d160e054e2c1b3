"""scripts/run_log.py on logs as runs leave them: lines cut off, damage."""
import json
import os
import pathlib
import tempfile
import unittest

import run_log
from command import Problem


class Logs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "log")

    def losses(self, end):
        """Of a log that ends so."""
        events = {"event": "config"}, *({"event": "step", "step": i, "loss": loss} for i, loss in enumerate((5.0, None, 4.0)))
        pathlib.Path(self.path).write_bytes("".join(json.dumps(event) + "\n" for event in events).encode() + end)
        return [step["loss"] for step in run_log.steps(run_log.lines(self.path))]

    def test_a_line_cut_off(self):
        for end in b"", b'{"event":"st', '{"event":"sample","text":"é'.encode()[:-1]:
            self.assertEqual(self.losses(end), [5, None, 4])
        self.assertEqual(self.losses(b'{"event":"step","loss":3}'), [5, None, 4, 3])  # only its end is missing

    def test_damage_is_named_with_its_line(self):
        for line in b'{"event":"st', b"", b"7", b'{"loss":3}', b"[" * 100_000:
            with self.subTest(line[:20]), self.assertRaisesRegex(Problem, f"{self.path}, line 5: not a JSON object with 'event'"):
                self.losses(line + b"\n")

    def test_no_log(self):
        with self.assertRaisesRegex(OSError, "No such file"):
            list(run_log.lines(self.path))
        os.mkfifo(self.path)
        with self.assertRaisesRegex(OSError, "It is not a regular file"):
            list(run_log.lines(self.path))
