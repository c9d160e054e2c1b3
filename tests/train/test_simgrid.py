"""A second opinion on --predict: SimGrid plays the graph that it writes, on the same links, and takes as long.

What SimGrid does its own way: transfers share a rank's link in as well as its link out; a bulk transfer gives way to none; no
transfer takes time from kernels; kernels of two streams share a GPU evenly.
"""
# limit: 400
# quick: none
import os
import re
import subprocess
import unittest

import harness

SHAPE = dict(layers=2, channels=384, heads=8, seq=256, predict_all=True)
MESHES = {  # machine, mesh, what both must agree within
    "8 CPU ranks on 2 hosts": ("laptop", dict(tp=4, dp=2, micro_batch=8), 0.01),
    "16 H100 on 2 hosts": ("h100x8", dict(tp=8, dp=2, micro_batch=16), 0.03),
    "64 CPU ranks on 16 hosts": ("laptop", dict(tp=4, dp=16, micro_batch=8), 0.01),
}


class SimGrid(harness.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.player = cls.path("simgrid_steps")
        source = os.path.join(harness.ROOT, "tests", "train", "simgrid_steps.cpp")
        built = subprocess.run(["c++", "-O2", "-o", cls.player, source, "-lsimgrid"], capture_output=True, text=True, check=False)
        if built.returncode != 0 and "simgrid/s4u.hpp: No such file" in built.stderr:
            raise unittest.SkipTest("SimGrid is not here (scripts/install_deps.sh --simgrid)")
        assert built.returncode == 0, built.stderr

    def compare(self, machine, mesh, overlap):
        """The step of one schedule in ms, by --predict and by SimGrid."""
        graph = self.fresh("steps.dot")
        shown = harness.run(harness.options(predict=machine, overlap=overlap, trace=graph, **SHAPE, **mesh), timeout=120)
        self.assertEqual(shown.status, 0, str(shown))
        ours = float(re.search(rf"^{overlap} +([\d.]+)", shown.out, re.M).group(1))
        played = subprocess.run([self.player, graph], capture_output=True, text=True, timeout=300, check=False)
        os.remove(graph)
        self.assertEqual(played.returncode, 0, played.stderr)
        return ours, float(played.stdout)

    def test_takes_as_long(self):
        for name, (machine, mesh, agree) in MESHES.items():
            for overlap in "none", "slice:4", "ring":
                with self.subTest(mesh=name, overlap=overlap):
                    ours, theirs = self.compare(machine, mesh, overlap)
                    print(f"{name}, {overlap}: {ours:.2f} ms, SimGrid {theirs:.2f} ms")
                    self.assertAlmostEqual(theirs / ours, 1, delta=agree)
