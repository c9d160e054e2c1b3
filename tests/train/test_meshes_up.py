"""UP on every mesh (see meshes.py), and that its model files are TPSP's."""
# quick: 2x1 2x2 fewer_rows what_is_saved
# sanitizers: too
# limit: 600
import os
import pathlib

import harness
import meshes
import reference


class Matrix(meshes.Matrix):
    strategy = "up"


class Uneven(meshes.Uneven):
    strategy = "up"


class Few(meshes.Few):
    strategy = "up"


class Files(meshes.Training):
    """One model file, whoever wrote it."""
    strategy = "up"
    shape, T, samples = meshes.Matrix.shape, meshes.Matrix.T, meshes.Matrix.samples

    def saved(self, *mesh, **more):
        out = self.fresh("out")
        steps = self.steps_of(*mesh, out=out, **more)
        return os.path.join(out, "model.bin"), steps

    def test_what_is_saved_is_the_same_model(self):
        by_tpsp, _ = self.saved(2, 2, strategy="tpsp")
        for mesh in ((2, 2), (4, 1), (1, 4)):
            with self.subTest(mesh=mesh):
                self.assertSameModel(self.saved(*mesh)[0], by_tpsp)

    def test_either_strategy_goes_on_from_it(self):
        path, _ = self.saved(2, 2)
        inputs, targets = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = reference.forward(self.shape, reference.read_model(path)[1], inputs, targets)[0]
        self.assertLess(expected, self.expected[-1][0])
        for strategy in meshes.STRATEGIES:
            for mesh in ((2, 1), (1, 2), (4, 1)):
                with self.subTest(strategy=strategy, mesh=mesh):
                    again, _ = self.saved(*mesh, strategy=strategy, init_from=path, steps=0)
                    self.assertTrue(pathlib.Path(again).read_bytes() == pathlib.Path(path).read_bytes(), "bytes differ")
                    steps = self.steps_of(*mesh, strategy=strategy, init_from=path)
                    self.assertLess(abs(steps[0]["loss"] / expected - 1), meshes.BETWEEN_MESHES)
                    self.assertLess(steps[-1]["loss"], steps[0]["loss"])
