"""UP on every mesh (see meshes.py), and that its model files are TPSP's."""
# quick: 2x1 2x2 fewer_rows Files
# sanitizers: too
# limit: 600
import os

import meshes


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
        self.logged(*mesh, out=out, **more)
        return os.path.join(out, "model.bin")

    def test_what_is_saved_is_the_same_model(self):
        by_tpsp = self.saved(2, 2, strategy="tpsp")
        for mesh in ((2, 2), (4, 1), (1, 4)):
            with self.subTest(mesh=mesh):
                self.assertSameModel(self.saved(*mesh), by_tpsp)
