"""The GPU program without a GPU: its kernels, transports and streams on the emulator (tests/emulator), which is real
as to the order of things and to every number, and says nothing about speed.

Steps as in meshes.py, but four of a smaller model, since each takes half a second, and the same promises: agreement with one rank and with the
reference, and the same bits by ring and direct, over either transport, and however streams are delayed against one
another.
"""
# quick: one_rank muon once collectives_beside collectives_among fewer_queues Trouble
# limit: 1800
# make: emulated-tests
import os
import re
import signal
import unittest
import unittest.mock

import numpy as np

os.environ["BUILD"] = "build/emulated-fp32"
import harness
import launcher
import meshes
import muon
import reference

DELAYS = {"EMULATOR_JITTER": "300", "EMULATOR_SEED": "5"}  # microseconds; order of threads in a block


class Steps(meshes.Training):
    shape, T, samples = meshes.SMALL
    strategy, steps = "tpsp", 4  # three of warm-up, and one after

    def train(self, ranks=1, timeout=400, **more):  # of four ranks on two cores they take half a minute
        return super().train(ranks, timeout, **more)

    def environment(self, **values):
        for name, value in values.items():
            os.environ[name] = value
            self.addCleanup(os.environ.pop, name)

    def bits(self, *mesh, **more):
        steps = self.steps_of(*mesh, **more)
        self.assertSameTraining(steps)
        return [(s["loss"], s["grad_norm"]) for s in steps]

    def check_row(self, row, *mesh, **more):
        """Over two transports that give the same bits, or twice over one, and once with delays: what nothing orders differs."""
        shares = [other.bits for other in harness.schedules("native", "exchanges")].count(row.bits) > 1
        wires = ("nccl", "ipc") if shares and row.bits != "-" else ("nccl", "nccl") if row.kind == "native" else ("ipc", "ipc")
        more["overlap"] = row.in_slices(2)
        found = self.bits(*mesh, transport=wires[0], **more)
        with unittest.mock.patch.dict(os.environ, DELAYS):
            self.assertEqual(self.bits(*mesh, transport=wires[1], **more), found, f"bits of {wires} differ")
        return found

    def check_mesh(self, *mesh):
        for strategy in meshes.STRATEGIES:
            first = {}
            for row in harness.schedules("native", "exchanges"):
                with self.subTest(strategy=strategy, mesh=mesh, row=row.name):
                    found = self.check_row(row, *mesh, strategy=strategy)
                    if row.bits != "-":
                        self.assertEqual(found, first.setdefault(row.in_slices(2).replace(row.name, row.bits), found), "bits differ")


class Llama(Steps):
    """Two heads of queries for each of keys and values; four heads share one sequence's products, two those of several."""
    shape, T, samples = reference.Shape(maxT=48, V=101, L=2, heads=4, C=48, Vp=128, KV=2, F=80, eps=1e-4, theta=100.0), 36, 4

    def test_llama(self):
        self.assertSameTraining(self.one_rank())
        for strategy in meshes.STRATEGIES:
            for mesh, recompute in ((2, 1), 0), ((2, 2), 1):
                with self.subTest(strategy=strategy, mesh=mesh, recompute=recompute):
                    more = dict(strategy=strategy, recompute=recompute)
                    found = self.check_row(*harness.schedules(name="ring"), *mesh, **more)
                    self.assertEqual(self.bits(*mesh, transport="nccl", overlap="direct:2", **more), found, "bits differ")


class Emulated(Steps):
    def test_one_rank(self):
        self.assertSameTraining(self.one_rank())

    def test_2x1(self):
        self.check_mesh(2, 1)

    def test_1x2(self):
        self.check_mesh(1, 2)

    def test_2x2(self):
        self.check_mesh(2, 2, 2)

    def test_4x1(self):
        self.check_mesh(4, 1)

    def test_muon(self):
        """Its twins, as numpy's in fp32, over two transports."""
        batch = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = {name: w.copy() for name, w in self.parameters.items()}
        history = muon.train(self.shape, expected, [batch] * self.steps, **meshes.RECIPE, **meshes.ADAMW)
        for transport, *mesh in ("auto", 1, 1), ("ipc", 2, 2), ("nccl", 2, 2):
            with self.subTest(transport=transport, mesh=mesh):
                out = self.fresh("out")
                steps = self.steps_of(*mesh, out=out, transport=transport, overlap="ring", optimizer="muon")
                for step, (loss, _, _) in zip(steps, history):
                    self.assertLess(abs(step["loss"] / loss - 1), meshes.BETWEEN_MESHES, step)
                found = reference.read_model(os.path.join(out, "model.bin"))[1]
                for name in muon.MATRICES:
                    moved = np.linalg.norm(expected[name] - self.parameters[name])
                    self.assertLess(np.linalg.norm(found[name] - expected[name]), meshes.BETWEEN_MESHES * moved, name)

    def test_once(self):
        """The most at a time: products on two streams, all slices under way."""
        for strategy in meshes.STRATEGIES:
            with self.subTest(strategy=strategy):
                self.check_row(*harness.schedules(name="once"), 4, 1, strategy=strategy)

    def test_two_levels(self):
        for strategy, mesh in (("tpsp", (4, 1)), ("tpsp", (1, 4)), ("up", (2, 2))):
            found = []
            for transport in "nccl", "auto", "ipc":
                with self.subTest(strategy=strategy, mesh=mesh, transport=transport):
                    found.append(self.bits(*mesh, strategy=strategy, transport=transport, overlap="levels:2"))
            self.assertEqual(found[0], found[1], "bits differ")
            if mesh == (4, 1):  # between replicas NCCL's collectives may be chosen, which ipc does not have
                self.assertEqual(found[0], found[2], "bits differ")

    def test_ipc_within_hosts_and_nccl_between(self):
        """Whatever the schedule, and however streams are delayed against one another: the bits of nccl alone."""
        for strategy, overlap in (("tpsp", "ring:2"), ("tpsp", "direct"), ("up", "direct:2"), ("tpsp", "levels:2"), ("tpsp", "slice:3")):
            with self.subTest(strategy=strategy, overlap=overlap):
                more = dict(strategy=strategy, overlap=overlap)
                plain = self.bits(4, 1, transport="nccl", **more)
                self.environment(**DELAYS)
                self.assertEqual(self.bits(4, 1, transport="auto", **more), plain)
                self.doCleanups()
        result = harness.run(self.arguments(**self.recipe(4, 1, transport="auto")), 4)
        self.assertIn("transport tp group by ipc within hosts, nccl between them\n", result.err)

    def test_gradients_neither_by_slices_nor_by_owners(self):
        # What is too thin for a GPU: added when all slices are here, sent with the rest of the layer.
        self.environment(EMULATOR_DEPTH_MIN="1000000", EMULATOR_ROWS_MIN="1000000")
        for mesh in ((2, 1), (2, 2)):
            for more in (dict(overlap="slice:3"), dict(overlap="ring:2")):
                with self.subTest(mesh=mesh, **more):
                    self.bits(*mesh, 2, transport="nccl", **more)

    def test_native_collectives_beside_exchanges_by_ipc(self):
        for overlap in (dict(overlap="none"), dict(overlap="slice:3"), dict(overlap="ring:2")):
            with self.subTest(**overlap):
                self.bits(2, 2, transport="auto", **overlap)

    def test_kernels_of_two_groups_that_do_not_fit_together(self):
        """They begin in one order on all ranks, or wait for each other."""
        self.environment(EMULATOR_MULTIPROCESSORS="24", **dict(DELAYS, EMULATOR_JITTER="2000"))
        for overlap in "slice:3", "none":
            with self.subTest(overlap=overlap):
                self.bits(2, 2, transport="nccl", overlap=overlap)

    def test_native_collectives_by_ipc(self):
        self.environment(**DELAYS)
        for strategy, mesh in (("tpsp", (4, 1)), ("tpsp", (1, 4)), ("up", (2, 2))):
            for overlap in "none", "slice:3":
                with self.subTest(strategy=strategy, mesh=mesh, overlap=overlap):
                    found = self.bits(*mesh, strategy=strategy, transport="ipc", overlap=overlap)
                    if mesh == (1, 4):  # between replicas they add in the order of exchanges
                        self.assertEqual(self.bits(*mesh, transport="ipc", overlap="ring", embedding="table"), found)

    def test_native_collectives_among_exchanges(self):
        """Trials take both in one step: over NCCL by one communicator of a group, over ipc made of exchanges."""
        for transport in "nccl", "ipc":
            with self.subTest(transport=transport):
                self.bits(2, 2, transport=transport, overlap="auto", plan="new")

    def test_fewer_queues_than_pairs(self):
        # 4 ranks: two groups with 7 streams each and 3 others; with 9 queues both share a stream for each direction.
        more = dict(transport="ipc", overlap="direct:2")
        plain = self.bits(4, 1, **more)
        self.environment(CUDA_DEVICE_MAX_CONNECTIONS="9", **DELAYS)
        self.assertEqual(self.bits(4, 1, **more), plain)
        self.doCleanups()
        self.environment(CUDA_DEVICE_MAX_CONNECTIONS="8")
        result = harness.run(self.arguments(tp=4, transport="ipc"), 4)
        self.assertFails(result, "9 streams need queues", "transport auto or nccl")

    def test_nothing_computed_again(self):
        """Nor gathered again, so that weight gradients are not added up slice by slice as it arrives; here they never are."""
        self.environment(EMULATOR_DEPTH_MIN="1000000")
        for strategy in meshes.STRATEGIES:
            for mesh in ((1, 1), (2, 1)):
                with self.subTest(strategy=strategy, mesh=mesh):
                    more = dict(strategy=strategy, transport="auto")
                    self.assertEqual(self.bits(*mesh, recompute=0, **more), self.bits(*mesh, recompute=1, **more))

    def test_profilers_see_names(self):
        """Ranges of NVTX: steps enclose the model's parts, these operations, and operations their computations."""
        folder = self.fresh("ranges")
        os.mkdir(folder)
        self.one_rank()
        self.environment(EMULATOR_RANGES=os.path.join(folder, "rank"))
        self.bits(2, 1, transport="nccl", overlap="ring:2")
        files = sorted(os.listdir(folder))
        self.assertEqual(len(files), 2)
        for name in files:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = file.read().splitlines()
            self.assertEqual(lines.pop(), "open 0")
            self.assertEqual([line for line in lines if line.startswith("step ")], [f"step {i}" for i in range(self.steps)])
            for layer in range(self.shape.L):
                for part in ("block forward", "block forward/all-gather att.qkv/att.qkv", "block backward",
                             "block backward/reduce-scatter mlp.fc1"):
                    self.assertGreaterEqual(lines.count(f"step/{part} {layer}"), self.steps, (part, layer, lines))
            for part in "embedding forward", "head forward", "head backward":
                self.assertEqual(lines.count(f"step/{part} -1"), self.steps, (part, lines))

    def test_saves_validates_and_samples(self):
        out = self.fresh("out")
        log = self.logged(2, 2, out=out, timeout=400, val=self.tokens, val_every=3, sample_every=3, save_every=3,
                          overlap="direct:3")
        self.assertSameTraining(harness.events(log, "step"))
        self.assertEqual(len(harness.events(log, "val")), 3)
        self.assertEqual(len(harness.events(log, "sample")), 2)
        self.assertSameModel(os.path.join(out, "model.bin"))


class Trouble(harness.Case):
    def test_words_that_come_before_their_bytes(self):
        result = harness.run(self.arguments(tp=2, transport="ipc"), 2, env={"EMULATOR_LATE_BYTES": "1"})
        self.assertFails(result, "data does not arrive from rank", "or not before the word", "try transport nccl")

    def test_a_gpu_whose_memory_or_words_others_cannot_reach(self):
        """ipc says why and what to do; auto takes NCCL, and says the same."""
        for reach, why in ("0", "let each rank see all GPUs of the host"), ("1", "streams cannot write words of another GPU"):
            for transport in "ipc", "auto":
                with self.subTest(why=why, transport=transport):
                    result = harness.run(self.arguments(tp=2, transport=transport), 2, env={"EMULATOR_PEERS": reach})
                    if transport == "ipc":
                        self.assertFails(result, why, "transport auto or nccl")
                        continue
                    self.assertEqual(result.status, 0, str(result))
                    self.assertRegex(result.err, f"transport tp group by nccl; not by ipc: rank [01]: .*{why}")

    def test_without_a_device(self):
        result = harness.run(self.arguments(), env={"EMULATOR_DEVICES": "0"})
        self.assertFails(result, "no CUDA device", "./train_gpt")

    def test_fewer_devices_than_ranks_share_them(self):
        result = harness.run(self.arguments(tp=2, transport="ipc"), 2, env={"EMULATOR_DEVICES": "1"})
        self.assertEqual(result.status, 0, str(result))

    def test_memory_is_shared_by_the_ranks_of_a_gpu(self):
        """Also where each rank sees its own alone, as Slurm may have it."""
        def free(see):
            shell = f'export EMULATOR_DEVICES=1 EMULATOR_FIRST=$(({see})); exec "$0" "$@"'
            words = self.arguments(tp=2, transport="ipc" if see == "0" else "nccl", steps=1)
            result = harness.run(["-np", 2, "sh", "-c", shell, harness.PROGRAM, *words], program=harness.MPIRUN)
            self.assertEqual(result.status, 0, str(result))
            return float(re.search(r"of ([\d.]+) MiB that are free", result.out)[1])
        self.assertAlmostEqual(free(launcher.RANK), 2 * free("0"), delta=1)

    def test_a_dead_rank_ends_the_others(self):  # test_emulated_freeze.py has frozen ones
        timeout, grace = 5, 5
        started = harness.Run(self.arguments(tp=2, steps=10 ** 6, timeout=timeout), 2)
        self.addCleanup(started.close)
        harness.wait_until(lambda: "step " in started.texts()[0] or started.ended(), 60,
                           lambda: f"no step was printed{started.result()}")
        processes = started.processes()
        self.assertEqual(sorted(processes), [0, 1], started.result())
        os.kill(processes[1], signal.SIGKILL)
        harness.wait_until(lambda: 0 not in started.processes(), timeout + grace,
                           lambda: f"rank 0 goes on{started.result()}")
