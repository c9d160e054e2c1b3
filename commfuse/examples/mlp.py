"""The MLP of mlp.c from Python: Y = max(0, X · A) · B on several ranks, with numpy and ctypes.

    LD_LIBRARY_PATH=$(pkg-config --variable=libdir commfuse) mpirun -np 2 python3 mlp.py

Beside mpi4py, on the ranks of a communicator of its: lib.cf_open_on(MPI._addressof(comm), b"auto", 0, 60).
"""
import ctypes
import sys

try:
    import numpy as np
except ImportError:
    sys.exit(f"{sys.executable} has no numpy: /usr/bin/python3 has it after apt-get install python3-numpy")

lib = ctypes.CDLL("libcommfuse.so", mode=ctypes.RTLD_GLOBAL)
P, I, L, D, B = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_bool


class Group(ctypes.Structure):  # its first fields
    _fields_ = [("name", ctypes.c_char_p), ("size", I), ("rank", I)]


class Span(ctypes.Structure):
    _fields_ = [("side", I), ("row", L), ("rows", L), ("blocks", I), ("row_stride", L), ("data", P),
                ("data_stride", L)]


class Config(ctypes.Structure):  # its first fields: the others are zero
    _fields_ = [("name", ctypes.c_char_p), ("group", ctypes.POINTER(Group)), ("operation", I), ("side", I), ("algorithm", P),
                ("slices", I), ("dtype", I), ("capacity", L)]


COMPUTE = ctypes.CFUNCTYPE(None, P, ctypes.POINTER(Span), P)
ALLGATHER, REDUCE_SCATTER, BEFORE, AFTER, FP32 = 0, 1, 1, 2, 0
for name, result, *arguments in (("version", ctypes.c_char_p), ("error", ctypes.c_char_p), ("errors_return", None, B),
                                 ("open", P, ctypes.c_char_p, I, D), ("open_on", P, P, ctypes.c_char_p, I, D), ("close", B, P),
                                 ("group_create", ctypes.POINTER(Group), P, ctypes.c_char_p, P, I),
                                 ("algorithm_find", P, ctypes.c_char_p),
                                 ("fuse_create_sized", P, P, ctypes.POINTER(Config), ctypes.c_size_t), ("fuse_free", B, P),
                                 ("fuse_run", P, P, P, L, L, COMPUTE, P, I)):
    function = getattr(lib, f"cf_{name}")
    function.restype, function.argtypes = result, arguments


def must(made):
    return made or sys.exit(lib.cf_error().decode())


def array(address, rows, columns):
    return np.frombuffer((ctypes.c_float * (rows * columns)).from_address(address), np.float32).reshape(rows, columns)


def blocks(span, columns):
    """The rows of a span, and their data."""
    for i in range(span.blocks):
        first = span.row + i * span.row_stride
        yield slice(first, first + span.rows), array(span.data + i * span.data_stride, span.rows, columns)


assert lib.cf_version().startswith(b"0.10."), "structs of another version"
lib.cf_errors_return(True)
context = must(lib.cf_open(b"auto", 1, 60))
tp = must(lib.cf_group_create(context, b"tp", None, 0))
N, rank = tp.contents.size, tp.contents.rank
ROWS, C, HIDDEN = 512, 256, 1024
rows = -(-ROWS // N)  # of a shard, as many on every rank: rows behind the last one are zero
random = np.random.default_rng(0)
X, A, W = (random.standard_normal(shape, np.float32) for shape in ((ROWS, C), (C, HIDDEN), (HIDDEN, C)))
X = np.concatenate([X, np.zeros((N * rows - ROWS, C), np.float32)])
own_rows, own = slice(rank * rows, (rank + 1) * rows), slice(HIDDEN * rank // N, HIDDEN * (rank + 1) // N)
A_own, W_own = np.ascontiguousarray(A[:, own]), W[own]
H = np.empty((N * rows, A_own.shape[1]), np.float32)


@COMPUTE
def up(_, span, __):  # rows of X have arrived
    for where, data in blocks(span.contents, C):
        H[where] = np.maximum(0, data @ A_own)


@COMPUTE
def down(_, span, __):  # rows of Y are to be sent
    for where, data in blocks(span.contents, C):
        np.matmul(H[where], W_own, out=data)


exact = np.maximum(0, X[own_rows].astype(float) @ A) @ W
for name, slices in ("none", 1), ("slice", 4), ("ring", 1):
    config = Config(b"up", tp, ALLGATHER, AFTER, lib.cf_algorithm_find(name.encode()), slices, FP32, rows * C)
    gather = must(lib.cf_fuse_create_sized(context, config, ctypes.sizeof(config)))
    config.name, config.operation, config.side = b"down", REDUCE_SCATTER, BEFORE
    scatter = must(lib.cf_fuse_create_sized(context, config, ctypes.sizeof(config)))
    gathered, partial = np.zeros((N * rows, C), np.float32), np.empty((N * rows, C), np.float32)
    gathered[own_rows] = X[own_rows]
    must(lib.cf_fuse_run(gather, gathered.ctypes.data, rows, C, up, None, -1))
    Y = array(must(lib.cf_fuse_run(scatter, partial.ctypes.data, rows, C, down, None, -1)), rows, C)
    assert np.allclose(Y, exact, rtol=1e-5, atol=1e-3), f"{name}: off by {abs(Y - exact).max()}"
    print(f"rank {rank} of {N}, {name}: equal to numpy")
    lib.cf_fuse_free(gather), lib.cf_fuse_free(scatter)
sys.exit(not lib.cf_close(context))
