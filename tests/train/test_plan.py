"""--overlap auto finds a plan in the first steps: which steps are trials, what is written down, what a run makes of it.

Which plan is found depends on the machine and its load, so nothing here depends on it.
"""
# limit: 240
# quick: trials known damaged
import glob
import itertools
import json
import os
import re
import shutil
import signal

import checkpoints
import harness
import launcher

STEPS, TRIALS_MAX = 220, 42


class Plan(harness.Case):
    def plan_arguments(self, **more):
        return self.arguments(**dict(steps=STEPS, dtype="fp32", save_every=0) | more)

    def go(self, ranks=2, log=None, wrapper=(), **more):
        log = log or self.fresh("log.jsonl")
        result = harness.run(self.plan_arguments(log=log, **more), ranks, timeout=120, wrapper=wrapper)
        self.assertEqual(result.status, 0, str(result))
        return harness.read_log(log), result

    def losses(self, log):
        return [e["loss"] for e in harness.events(log, "step")]

    def written(self, text):
        path = self.fresh("plan.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def printed(self, **more):
        """The plan that --dry-run prints."""
        result = harness.run(self.plan_arguments(dry_run=True, **more), 2)
        self.assertEqual(result.status, 0, str(result))
        return re.search(r"The plan.*?\n(\{.*?\n\})\n", result.out, re.S).group(1)

    def test_where_nothing_hides_a_plan_of_none_posts_what_the_mode_posts(self):
        """More threads than cores: the predicted plan has the library's collectives, and so has what no plan names."""
        def posted(**more):
            result = harness.run(self.plan_arguments(dry_run=True, tp=2, threads=256, **more), 2)
            self.assertEqual(result.status, 0, str(result))
            return re.search(r"A step of one micro-batch: .*", result.out).group(0), result.out
        mode, predicted = posted(overlap="none")[0], posted()
        self.assertRegex(mode, " 0 exchanges of rank 0 in 0 units, [1-9]")
        self.assertEqual(predicted[0], mode)
        plan = json.loads(re.search(r"The plan.*?\n(\{.*?\n\})\n", predicted[1], re.S).group(1))
        self.assertEqual(set(plan["operations"].values()), {"none"})

    def test_gradients_owner_by_owner_in_slices_of_all_owners(self):
        """So that what is computed for a native collective has blocks: with the losses of blocking ones. What auto takes depends on
        the cores, hence several links."""
        options = dict(init_from=None, layers=2, channels=256, heads=4, vocab=self.shape.V, tp=2, dp=2, ranks_per_host=2, micro_batch=2,
                       seq=64, batch=4, steps=4, warmup=1, gradients="owners", embedding="rows")
        for gbit in 10, 1, 3, 30, 100:
            shown = harness.run(self.plan_arguments(dry_run=True, network_gbit=gbit, **options), 4).out
            if re.search(r" \(gradient computed owner by owner.*\nreduce-scatter, slice, .* [2-9] slices per shard", shown):
                break
        else:
            self.skipTest("auto takes no slices here")
        cut, whole = (self.losses(self.go(4, overlap=overlap, network_gbit=gbit, **options)[0]) for overlap in ("auto", "none"))
        for one, other in zip(cut, whole):
            self.assertAlmostEqual(one / other, 1, delta=1e-5)
        self.assertLess(whole[-1], 0.99 * whole[0])

    def test_gradients_are_cut_where_nothing_else_hides_them(self):
        """Owner by owner: with a thousand tokens for each that a link moves, only what backward computes last; with few, all of a
        layer, and the table, of which few rows travel; and all of a layer where threads outnumber cores."""
        def owner_by_owner(ranks=1, threads=2, **more):  # a rank alone reckons with a core that moves bytes
            result = harness.run(harness.options(dry_run=True, dp=2, train=self.tokens, threads=threads, channels=384, heads=6,
                                                 layers=3, vocab=512, **more), ranks)
            self.assertEqual(result.status, 0, str(result))
            return re.findall(r"^  (\w+) .*?(from layer \d)? ?(?:on )?2 owners of .* owner by owner", result.out, re.M)
        self.assertEqual(owner_by_owner(seq=128, micro_batch=64, batch=128), [("qkvw", "")])
        all_of_a_layer = ["qkvw", "attprojw", "fcw", "fcprojw"]
        self.assertEqual([name for name, _ in owner_by_owner(seq=2, micro_batch=1, batch=2)], [*all_of_a_layer, "wte"])
        self.assertEqual([name for name, _ in owner_by_owner(seq=128, micro_batch=64, batch=128, ranks=2, threads=256)],
                         all_of_a_layer)  # the table travels whole there
        self.assertEqual(len(owner_by_owner(seq=128, micro_batch=64, batch=128, overlap="commfuse")), 5)

    def test_rows_of_the_table_travel_if_they_are_few(self):
        for sequence, sent in ((8, "rows are sent"), (256, "the whole table is sent")):  # 128 and 4096 tokens, 256 rows of an owner
            result = harness.run(harness.options(dry_run=True, dp=2, train=self.tokens, channels=48, heads=3, layers=1, vocab=512,
                                                 seq=sequence, micro_batch=16, batch=32), 1)
            self.assertEqual(result.status, 0, str(result))
            self.assertIn(f"token embedding: {sent}", result.out)

    def test_trials_train_as_ever(self):
        """The same losses, a bounded number of marked steps, each operation once in plan, file and log."""
        for mesh in (dict(tp=2), dict(tp=2, strategy="up")):
            with self.subTest(**mesh):
                out = self.fresh("out")
                log, result = self.go(out=out, schedule="constant", **mesh)
                steps = harness.events(log, "step")
                trials = [e["step"] for e in steps if e.get("trial")]
                self.assertEqual(trials, list(range(len(trials))))
                self.assertTrue(10 <= len(trials) <= TRIALS_MAX, trials)
                plan, = harness.events(log, "plan")
                self.assertIn(plan["step"], (len(trials) - 1, len(trials)))
                self.assertIn("plan      found in trials", result.out)
                self.assertLessEqual({"ring_ms", "ring:2_ms"}, plan.keys())
                with open(os.path.join(out, "plan.json"), encoding="utf-8") as file:
                    operations = json.load(file)["operations"]
                self.assertEqual(operations, {name: plan[name] for name in operations})
                for name in operations:  # the time of every choice that was measured, the library's among them
                    times = {key[len(name) + 1:]: ms for key, ms in plan.items() if key.startswith(f"{name} ")}
                    self.assertTrue(len(times) >= 3 and any(choice.startswith(("none", "slice")) for choice in times), times)
                    self.assertTrue(all(choice.endswith("_ms") and ms >= 0 for choice, ms in times.items()), times)
                plain, _ = self.go(overlap="commfuse", schedule="constant", steps=TRIALS_MAX + 20, **mesh)
                for ours, theirs in zip(self.losses(log), self.losses(plain)):
                    self.assertLess(abs(ours / theirs - 1), 1e-5)

    def test_choices_that_do_not_fit_are_left_out(self):
        """A rank that is far larger than any machine has staging for the first choice of each operation alone, and says so."""
        def staging(steps, **shape):
            result = harness.run(harness.options(dry_run=True, tp=2, layers=2, vocab=512, steps=steps, **shape), 2)
            self.assertEqual(result.status, 0, str(result))
            mib = float(re.search(r"^communication staging +(\S+)", result.out, re.M).group(1))
            return mib, re.search(r"\d+ choices are not tried", result.out) is not None
        small = dict(channels=128, heads=2, seq=128, micro_batch=4, batch=4)
        large = dict(channels=4096, heads=64, seq=8192, micro_batch=4096, batch=4096)
        for shape, left_out in ((small, False), (large, True)):
            with self.subTest(**shape):
                untried, tried = staging(20, **shape), staging(STEPS, **shape)
                self.assertEqual((tried[0] == untried[0], untried[1], tried[1]), (left_out, False, left_out))

    def test_a_short_run_tries_nothing(self):
        log, _ = self.go(tp=2, steps=20)
        self.assertFalse(any(e.get("trial") for e in harness.events(log, "step")))
        self.assertEqual(harness.events(log, "plan"), [])

    def test_a_short_run_between_hosts_says_what_its_plan_assumes(self):
        path = self.written(json.dumps(json.loads(self.printed(tp=2, ranks_per_host=1))))
        for more, said in (dict(), True), (dict(ranks_per_host=2), False), (dict(network_gbit=1), False), (dict(plan=path), False), \
                (dict(reproducible=1), False), (dict(overlap="ring"), False), (dict(tp=1, dp=2, micro_batch=4), True), \
                (dict(tp=1, dp=2, micro_batch=4, steps=211), True):
            with self.subTest(**more):
                _, result = self.go(**{**dict(tp=2, steps=2, ranks_per_host=1), **more})
                self.assertEqual("the network's rate assumed: --network-gbit" in result.out, said, result.out)
                self.assertEqual("; --plan new, or a run of" in result.out, said and "dp" not in more, result.out)  # tp 1 tries nothing

    def test_a_known_plan_gives_the_same_bits(self):
        """The dry run's plan, changed by hand, from the first step on; no trials, and again the same bits. Printed, commfuse is ring."""
        plan = json.loads(self.printed(tp=2))
        names = list(plan["operations"])
        for name, choice in zip(names, ("commfuse:2", "direct:4", "once", "slice:2", "none")):
            plan["operations"][name] = choice
        path = self.written(json.dumps(plan))
        first, _ = self.go(tp=2, plan=path, steps=30)
        second, _ = self.go(tp=2, plan=path)
        self.assertFalse(any(e.get("trial") for e in harness.events(second, "step")))
        again, _ = self.go(tp=2, plan=path, steps=30)
        self.assertEqual(self.losses(first), self.losses(again))
        shown = harness.run(self.plan_arguments(tp=2, plan=path, dry_run=True), 2).out
        self.assertIn('"' + names[0] + '":\t"ring:2"', shown)
        self.assertIn("direct, rank 0 of 2, 4 slices", shown)

    def test_all_ranks_judge_a_plan_alike(self):
        """Also where hosts differ, as ranks of one and of two threads do."""
        out = self.fresh("out")
        shell = "exec \"$0\" \"$@\" --threads $((" + launcher.RANK + " + 1))"
        for more in dict(plan="new", steps=60), dict(steps=4):
            values = self.plan_arguments(out=out, tp=2, threads=None, **more)
            result = harness.run(["-np", 2, "sh", "-c", shell, harness.PROGRAM, *values], program=harness.MPIRUN)
            self.assertEqual(result.status, 0, str(result))
            for step in glob.glob(f"{out}/step_*"):
                shutil.rmtree(step)
            with open(f"{out}/plan.json", encoding="utf-8") as file:
                plan = json.load(file)
            self.assertIn(", 1 threads, ", plan["machine"])
            plan["operations"] = dict.fromkeys(plan["operations"], "direct:3")  # which nobody predicts
            with open(f"{out}/plan.json", "w", encoding="utf-8") as file:
                json.dump(plan, file)
        self.assertNotIn("not used", result.text)

    def test_a_plan_of_another_machine_is_taken_with_a_note(self):
        plan = json.loads(self.printed(tp=2))
        here = plan["machine"]
        for machine in (here, here.replace("2 ranks", "16 ranks") + "\x1b[2J"):
            plan["machine"] = machine
            result = harness.run(self.plan_arguments(tp=2, plan=self.written(json.dumps(plan)), dry_run=True), 2)
            self.assertEqual(result.status, 0, str(result))
            self.assertEqual("was found on " + machine.replace("\x1b", "?") + "; this is " + here in result.out, machine != here,
                             result.out)
            self.assertNotIn("\x1b", result.text)

    def test_damaged_plans_are_refused(self):
        good = self.printed(tp=2)
        name = list(json.loads(good)["operations"])[0]
        cases = {
            "is damaged": good[:len(good) // 2],
            "for an operation of this run: forward all-gather nothing": good.replace(name, "forward all-gather nothing"),
            "has more than a JSON object": good + "{}",
            "has more than a JSON object: see line": good + "\0" + good,
            "lacks the operation": re.sub(r'\n\t\t"' + name + '":[^\n]*', "", good),
            "has no valid choice": good.replace('"operations":\t{', '"operations":\t{"' + name + '":\t"ring:0",', 1),
            "names an operation twice": good.replace('"operations":\t{', '"operations":\t{"' + name + '":\t"ring",', 1),
            "this run is tp 2": good.replace("2 layers", "3 layers"),
        }
        for text, plan in cases.items():
            with self.subTest(text):
                self.assertNotEqual(plan, good)
                result = harness.run(self.plan_arguments(tp=2, plan=self.written(plan)), 2)
                self.assertFails(result, "plan", text)
        self.assertFails(harness.run(self.plan_arguments(tp=2, plan=self.path("nowhere.json")), 2), "--plan", "nowhere.json")
        self.assertFails(harness.run(self.plan_arguments(tp=2, plan=self.written(good), overlap="none"), 2), "--plan", "--overlap")

    def test_a_found_plan_is_kept(self):
        """A run that resumes keeps it, another in the same directory begins with it, and both say the same."""
        out = self.fresh("out")
        self.go(tp=2, out=out, save_every=STEPS)
        with open(os.path.join(out, "plan.json"), encoding="utf-8") as file:
            found = json.load(file)
        log, _ = self.go(tp=2, out=out, steps=2 * STEPS + 10, force=True)
        self.assertFalse(any(e.get("trial") for e in harness.events(log, "step")))
        with open(os.path.join(out, "plan.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), found)
        log, _ = self.go(tp=2, out=out, steps=3 * STEPS + 20, plan="new", force=True)
        self.assertTrue(any(e.get("trial") for e in harness.events(log, "step")))

    def test_a_checkpoint_has_the_plan_of_its_step(self):
        """Whatever plan.json says: a run that was killed after its trials repeats its bits from a checkpoint that was saved after
        them; from one saved in them it tries again. The log has one plan, and every step once."""
        out, path = self.fresh("out"), self.fresh("log.jsonl")
        whole, _ = self.go(tp=2, out=out, log=path, save_every=1, keep=0)
        plan, = harness.events(whole, "plan")
        last = plan["step"]  # trial
        with open(os.path.join(out, "plan.json"), encoding="utf-8") as file:
            other = json.load(file)
        found = other["operations"]
        other["operations"] = dict.fromkeys(found, "direct:3")
        for step in (6, last, last + 1, last + 9):
            with self.subTest(step=step):
                again, log = self.fresh("out"), self.fresh("log.jsonl")
                shutil.copytree(checkpoints.directory(out, step), checkpoints.directory(again, step))
                shutil.copy(path, log)
                with open(os.path.join(again, "plan.json"), "w", encoding="utf-8") as file:
                    json.dump(other, file)
                gone_on, _ = self.go(tp=2, out=again, log=log)
                steps = harness.events(gone_on, "step")
                self.assertEqual([e["step"] for e in steps], list(range(STEPS)))
                self.assertEqual(len(harness.events(gone_on, "plan")), 1)
                self.assertEqual("trial" in steps[step], step <= last)
                if step > last:
                    self.assertEqual(self.losses(gone_on), self.losses(whole))
                    kept = checkpoints.manifest(again, STEPS)["options"]["operations"]
                    self.assertEqual(json.loads(kept)["operations"], found)
                for ours, theirs in itertools.zip_longest(self.losses(gone_on), self.losses(whole)):
                    self.assertLess(abs(ours / theirs - 1), 1e-5)

    def test_a_checkpoint_has_its_policy(self):
        """That of ranks without a core to spare, although a dry run alone reckons with one."""
        more = dict(train=self.tokens, channels=48, heads=3, layers=1, vocab=512, seq=8, val_every=0, steps=1, peak_tflops=1)
        out, core = self.fresh("out"), min(os.sched_getaffinity(0))
        result = harness.run(harness.options(dp=2, micro_batch=16, gradients="ready", out=out, **more), 2,
                             wrapper=("taskset", "-c", str(core)))
        self.assertEqual(result.status, 0, str(result))
        for kept, sent in ((dict(dp=2, out=out), "the whole table is sent"), (dict(dp=2, micro_batch=16), "rows are sent")):
            result = harness.run(harness.options(dry_run=True, **kept, **more), 1)
            self.assertIn(f"token embedding: {sent}", result.out, str(result))

    def test_reproducible_runs_have_equal_bits(self):
        """Free, or with all ranks on one core: a run long enough for trials has none, and the same state at its end; so has one that
        resumes without the option."""
        one = "taskset", "-c", str(min(os.sched_getaffinity(0)))
        for mesh in (dict(tp=2), dict(dp=2, micro_batch=2)):
            with self.subTest(**mesh):
                out, crowded, resumed = (self.fresh("out") for _ in range(3))
                log, _ = self.go(out=out, reproducible=1, save_every=STEPS // 2, **mesh)
                self.assertFalse(any(e.get("trial") for e in harness.events(log, "step")))
                shutil.copytree(checkpoints.directory(out, STEPS // 2), checkpoints.directory(resumed, STEPS // 2))
                self.go(out=crowded, reproducible=1, wrapper=one, **mesh)
                self.go(out=resumed, micro_batch=None)
                for other in crowded, resumed:
                    self.assertTrue(checkpoints.saved_bytes(other, STEPS) == checkpoints.saved_bytes(out, STEPS))

    def test_reproducible_choices(self):
        """Policy, plan and recomputation are those of the shape: neither cores, nor free memory, nor a library's sums."""
        small = dict(train=self.tokens, dp=2, channels=48, heads=3, layers=1, vocab=512, seq=8, micro_batch=16, dry_run=True)
        one = "taskset", "-c", str(min(os.sched_getaffinity(0)))
        def chosen(ranks, wrapper=(), **more):
            result = harness.run(harness.options(**small | more), ranks, wrapper=wrapper)
            self.assertEqual(result.status, 0, str(result))
            return re.sub(".machine.:.*", "", result.out[result.out.index("Gradients and weights"):]), result.out
        for reproducible in 0, 1:
            here, elsewhere = (chosen(*where, reproducible=reproducible)[0] for where in ((2, one), (1,)))
            self.assertEqual(here == elsewhere, bool(reproducible), here + elsewhere)
            again = "computes GELU and layer norms again" in chosen(2, train=None, dp=None, tp=2, channels=4096, heads=64, seq=8192,
                                                                    micro_batch=4096, reproducible=reproducible)[1]
            self.assertEqual(again, not reproducible)
        for words in (dict(overlap="none"), dict(overlap="slice"), dict(plan="new")):
            (name, value), = words.items()
            self.assertFails(harness.run(harness.options(reproducible=1, **small | words), 2), f"--{name} {value}", "one order")

    def test_a_rank_killed_during_trials(self):
        log = self.fresh("log.jsonl")
        started = harness.Run(self.plan_arguments(tp=2, steps=100000, log=log), 2)
        self.addCleanup(started.close)
        harness.wait_until(lambda: started.ended() or len(harness.events(harness.read_log(log), "step")) >= 3, 60, "three trials")
        self.assertTrue(harness.events(harness.read_log(log), "step")[2].get("trial"))
        os.kill(started.processes()[1], signal.SIGKILL)
        started.wait(60)
        self.assertNotEqual(started.result().status, 0)
