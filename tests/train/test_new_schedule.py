"""A new schedule is one row of the table in commfuse/schedule.c: in a copy of the sources, Domino's halves (the generator of
commfuse/examples/domino.c) train in the trainer, and the tests prove them without being told of them."""
# limit: 300
# quick: none
import json
import pathlib
import re

import grown
import harness

TESTS = f"{grown.B}/tests/commfuse"
ROW = """    {.name = "domino", .serves = SUMS, .fallback = "direct", .generate = domino, .same_bits = "ring", .slices = 2,
     .max_slices = MOST, .help = "Domino: the partial sums of a part travel while the next is computed"},
"""
LINES = 40  # that a new schedule may take


def add_row(source):
    """schedule.c with a generator before the table, and a row in it."""
    example = (grown.ROOT / "commfuse/examples/domino.c").read_text(encoding="utf-8")
    generator = re.search(r"^static bool domino\(.*?^}\n\n", example, re.MULTILINE | re.DOTALL)[0]
    text = source.replace("// --- the table ---\n\n", "// --- the table ---\n\n" + generator, 1)
    return text.replace('    {.name = "commfuse"', ROW + '    {.name = "commfuse"', 1)


class NewSchedule(grown.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.grow({"commfuse/schedule.c": add_row}, f"{grown.B}/train_gpt",
                 *(f"{TESTS}/{name}" for name in ("test_schedule", "test_fuse", "test_choice", "tool_rows")))

    def trained(self, **more):
        """Losses, norms and the model as bits."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        self.run_grown(2, out=out, log=log, steps=5, dtype="fp32", **more)
        steps = harness.events(harness.read_log(log), "step")
        self.assertEqual(len(steps), 5)
        return [(s["loss"], s["grad_norm"]) for s in steps], pathlib.Path(out, "model.bin").read_bytes()

    def printed(self, *arguments, **more):
        result = harness.run([*arguments, *self.arguments(dtype="fp32", **more)], program=self.program)
        self.assertEqual(result.status, 0, str(result))
        return result.out

    def test_it_takes_few_lines_of_one_file(self):
        self.assertLessEqual(self.lines, LINES)
        compiled = re.findall(r"-c -o \S+ (\S+\.c)\b", self.made.stdout)
        self.assertEqual(compiled, ["commfuse/schedule.c"])

    def test_it_is_told_of(self):
        self.assertRegex(self.printed("--help"), r"\n    domino +Domino: ")
        shown = self.printed(dry_run=True, tp=2, overlap="domino:2")
        self.assertIn("reduce-scatter, domino, rank 0 of 2, 2 slices", shown)
        self.assertIn("all-gather, direct, rank 0 of 2, 2 slices", shown)
        whole = self.printed(dry_run=True, tp=2, overlap="domino:1")  # the generator declines
        self.assertIn("reduce-scatter, direct, rank 0 of 2, 1 slice", whole)
        self.assertNotIn("domino, rank", whole)

    def test_it_trains_with_the_bits_of_ring(self):
        for mesh in dict(tp=2), dict(dp=2, micro_batch=2), dict(tp=2, strategy="up"):
            with self.subTest(**mesh):
                ring, domino = (self.trained(overlap=f"{name}:2", **mesh) for name in ("ring", "domino"))
                self.assertEqual(ring[0], domino[0], "losses differ")
                self.assertTrue(ring[1] == domino[1], "model.bin differs")

    def test_a_plan_may_have_it(self):
        """As auto may find it: in place of every reduce-scatter beside a computation."""
        shown = self.printed(dry_run=True, tp=2)
        plan = json.loads(shown[shown.index("\n{") + 1:shown.rindex("}") + 1])
        plan["operations"].update({name: "domino:2" for name in plan["operations"] if " reduce-scatter " in name})
        path = pathlib.Path(self.fresh("plan.json"))
        path.write_text(json.dumps(plan), encoding="utf-8")
        self.assertIn("reduce-scatter, domino, rank 0 of 2, 2 slices", self.printed(dry_run=True, tp=2, plan=path))
        self.trained(tp=2, plan=path)

    def test_the_tests_prove_it(self):
        for ranks, name in (1, "test_schedule"), (1, "test_choice"), (2, "test_fuse"):
            with self.subTest(name):
                result = harness.run([], ranks, program=str(self.tree / TESTS / name), timeout=120)
                self.assertEqual(result.status, 0, str(result))
                self.assertNotIn("FAILED", result.text)
        rows = harness.run([], program=str(self.tree / TESTS / "tool_rows"))
        self.assertIn("\ndomino ring 1024 exchanges\n", rows.out)
