"""What scripts/gpu_check.py checks and measures, and how.

A stage is a module with run(check): build, device, twins, losses, ranks, sanitizer, times and kernels, in the order of
plan.py. It tells what it finds by check.verdict(), say() and show(), and puts its figures into check.data, which
becomes results.json. When its time is over, the runner raises Late out of whatever the stage has started.

    plan.py, check.py, summary.py    the whole: which stage runs how long, what has been found, what is printed last
    runner.py, reaper.py             processes: started, listened to, ended in time, whatever ends this script
    training.py, tokens.py           a run of train_gpt and what it trains on
    meshes.py, turns.py              of ranks: which meshes, what tells most first; who may run beside whom
    models.py, ours.py, pytorch.py,  of times: what is timed, by this program and by PyTorch, with how much memory, and
    nvidia.py, table.py              as which table
"""
