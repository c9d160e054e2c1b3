"""A run of train_gpt, of one rank or of several on the one GPU, and what its log says."""
import contextlib
import socket

import run_log


def words_of(**options):
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Several ranks as processes of one NCCL communicator on one GPU: it must take them for different hosts, which then
# talk through sockets on the loopback device. Few blocks each: a kernel that waits for a peer's must leave it some.
def environment(rank, size, port, transport):
    e = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if transport in ("nccl", "auto"):
        e.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_SOCKET_IFNAME="lo",
                 NCCL_IB_DISABLE=1, NCCL_NET="Socket", NCCL_MNNVL_ENABLE=0, NCCL_MAX_CTAS=4, NCCL_DEBUG="WARN")
    return {name: str(value) for name, value in e.items()}


def train(check, program, ranks=1, transport="auto", limit=None, **options):
    """(steps of the log, config of the log, Result)"""
    log = check.path("log.jsonl")
    command = [program, *words_of(log=log, transport=transport, val_every=0, **options)]
    if ranks == 1:
        result = check.runner.run(command, limit)
    else:
        port = free_port()
        result = check.runner.ranks([command] * ranks, [environment(r, ranks, port, transport) for r in range(ranks)],
                                    limit)
    events = read_log(log)
    config = next((event for event in events if event["event"] == "config"), {})
    return [event for event in events if event["event"] == "step"], config, result


def read_log(path):
    """Events up to the first line that is none: whoever writes it may have been killed."""
    events = []
    with contextlib.suppress(FileNotFoundError, run_log.Damaged):
        for _, event in run_log.events(path):
            events.append(event)
    return events


def relative(found, expected):
    """Largest relative difference of two lists of losses; infinite if they do not match at all."""
    pairs = list(zip(found, expected))
    if not pairs or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)
