"""Times taken on a machine with other work. That can only lengthen a time, so what counts is the mean of the faster half."""
import numpy as np

DRAWINGS = 200


def undisturbed(times, values=None):
    """The mean over the faster half of each row of times: of the values that belong to them, by default the times themselves."""
    faster = np.argsort(times, axis=-1, kind="stable")[..., :(np.shape(times)[-1] + 1) // 2]
    return np.take_along_axis(np.asarray(times if values is None else values), faster, -1).mean(axis=-1)


def drawings(count, block=1):
    """Bootstrap samples of repetitions, in blocks of consecutive ones: indices (DRAWINGS, count)."""
    begins = np.random.default_rng(1).integers(count, size=(DRAWINGS, -(-count // block)))
    return ((begins[:, :, None] + np.arange(block)) % count).reshape(DRAWINGS, -1)[:, :count]
