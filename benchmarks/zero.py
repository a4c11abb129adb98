"""DeepSpeed's ZeRO with overlap_comm: does recording keep communication hidden, and what does it cost?

Blocks of steps follow each other in random order, four to a round, all in one process and with one engine: with ddpan
on, with DeepSpeed's own comms logger on, and two with neither, one of which is the control. Printed are medians over
rounds of the ratio of mean step times, each with a bootstrap interval, and the share of each operation that was hidden
behind the computation, as ddpan recorded it.

On a CPU DeepSpeed has no streams. ZeRO 1 and 2 wait for each bucket before they go on, with ``overlap_comm`` or without
it: there is no overlap to lose. ZeRO 3 gathers parameters ahead of their use, which a CPU overlaps too. The cases with
a simulated stream stand for a GPU: what ZeRO hands to its reduction stream, a thread does, and the training waits for
it where DeepSpeed lets the device wait. The comms logger synchronises the device after each operation, and so it waits
for that thread there.

    python -m benchmarks.zero                  all cases, 2 ranks
    python -m benchmarks.zero --case zero3 --rounds 40
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
import torch
import torch.distributed as dist
from torch import nn

from ddpan import collector
from ddpan.analysis import collectives, load

from .overhead import interval

LAYERS: Final = 12
WIDTH: Final = 384
BATCH: Final = 96
STEPS: Final = 10
WARM_UP: Final = 2
LAYERS_IN_BUCKET: Final = 2
LINK_SECONDS: Final = 0.003
"""What an all-reduce on the simulated stream takes in addition, as on a slow network: it costs no processor."""


class Case(NamedTuple):
    """A stage of ZeRO, and whether a thread stands in for its reduction stream."""

    stage: int
    simulated: bool


CASES: Final = {
    "zero1": Case(1, False),
    "zero2": Case(2, False),
    "zero3": Case(3, False),
    "zero1_simulated_stream": Case(1, True),
    "zero2_simulated_stream": Case(2, True),
}
TIMES, LOGS = "times.json", "logs"
OFF, AGAIN, RECORDED, LOGGED = range(4)
"""The blocks of a round."""


class SimulatedStream:
    """A thread in place of the reduction stream that ZeRO 1 and 2 have on a GPU.

    Args:
        optimizer: ZeRO's, whose work on the stream it does.
        synchronizes: whether the host waits after each operation, as the comms logger makes it.
    """

    def __init__(self, optimizer: Any, synchronizes: Callable[[], bool]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._done: list[Future[Any]] = []
        self._synchronizes = synchronizes
        reduce_bucket = optimizer.allreduce_and_copy_with_multiple_ranks

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(LINK_SECONDS)
            reduce_bucket(*args, **kwargs)

        optimizer.allreduce_and_copy_with_multiple_ranks = self._later(slow)
        optimizer.copy_grads_in_partition = self._later(optimizer.copy_grads_in_partition)
        # Where the device's current stream waits for the reduction stream: before the next bucket, and at the end.
        optimizer.average_tensor = self._first(optimizer.average_tensor)
        optimizer._clear_previous_reduced_grads = self._first(optimizer._clear_previous_reduced_grads)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _later(self, work: Callable[..., None]) -> Callable[..., None]:
        def submit(*args: Any, **kwargs: Any) -> None:
            self._done.append(self._thread.submit(work, *args, **kwargs))
            if self._synchronizes():
                self._wait()

        return submit

    def _first(self, function: Callable[..., None]) -> Callable[..., None]:
        def wait_first(*args: Any, **kwargs: Any) -> None:
            self._wait()
            function(*args, **kwargs)

        return wait_first

    def _wait(self) -> None:
        while self._done:
            self._done.pop(0).result()


class Trainer:
    """One engine, trained in all blocks."""

    def __init__(self, case: Case) -> None:
        import deepspeed  # not in the process that starts the ranks: it takes seconds

        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        model = nn.Sequential(*layers)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(case))
        self._inputs = torch.randn(BATCH, WIDTH)
        self._logger = deepspeed.comm.comm.comms_logger
        self._logger.prof_all = True
        stream = SimulatedStream(self._engine.optimizer, lambda: bool(self._logger.enabled)) if case.simulated else None
        self.close = stream.close if stream is not None else lambda: None

    def block(self, place: int, log_dir: str) -> float:
        """Mean step time in seconds, recorded or logged as ``place`` says."""
        if place == RECORDED:
            collector.start(log_dir)
        self._logger.enabled = place == LOGGED
        for _ in range(WARM_UP):
            self._step()
        gc.collect()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            self._step()
        ended = time.perf_counter()
        dist.barrier()
        self._logger.enabled = False
        if place == RECORDED:
            collector.stop()
        return (ended - began) / STEPS

    def _step(self) -> None:
        self._engine.backward(self._engine(self._inputs).square().mean())
        self._engine.step()


def settings(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    layer = WIDTH * (WIDTH + 1)
    zero: dict[str, Any] = {
        "stage": case.stage,
        "overlap_comm": True,
        "reduce_bucket_size": LAYERS_IN_BUCKET * layer,
    }
    if case.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": LAYERS_IN_BUCKET * layer}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def train(case: Case, rounds: int, seed: int, log_dir: str) -> list[list[float]]:
    """Step time of each round's blocks."""
    trainer = Trainer(case)
    order = random.Random(seed)
    measured = []
    for _ in range(rounds + 1):
        blocks = [0.0] * 4
        for place in order.sample(range(4), 4):
            blocks[place] = trainer.block(place, log_dir)
        measured.append(blocks)
    trainer.close()
    return measured[1:]


def rank_main(options: argparse.Namespace) -> None:
    """What each rank runs."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    folder = Path(options.result)
    measured = train(CASES[options.case], options.rounds, options.seed, str(folder / LOGS))
    if dist.get_rank() == 0:
        (folder / TIMES).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def hidden(log_dir: Path) -> pl.DataFrame:
    """By operation, over all runs: rows of a rank and run, its milliseconds in them, and the share that was hidden."""
    runs = [path for path in sorted(log_dir.iterdir()) if path.is_dir()]
    tables = [collectives(load(run)).sizes.drop_nulls("total_ns") for run in runs]
    spent = pl.col("total_ns").sum()
    share = (pl.col("total_ns") * pl.col("hidden_ns") / pl.col("duration_ns")).sum() / spent
    by_op = pl.concat(tables).filter(pl.col("op") != "barrier").group_by("op")
    return by_op.agg(count=pl.col("count").sum() / len(runs), ms=spent / 1e6 / len(runs), hidden=share).sort("op")


def measure(name: str, rounds: int, seed: int) -> None:
    """Start the ranks for one case and print its lines."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        options = ["--case", name, "--rounds", str(rounds), "--seed", str(seed), "--result", folder]
        command = [*launcher, "benchmarks.zero", *options]
        subprocess.run(command, check=True, env=environment(os.environ), stdout=subprocess.DEVNULL)
        tell(name, json.loads(Path(folder, TIMES).read_text()), hidden(Path(folder, LOGS)))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Of the ranks: one thread each, DeepSpeed on the CPU, and nothing recorded before it is asked for."""
    kept = {name: value for name, value in environ.items() if name != "DDPAN_LOG_DIR"}
    own = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "DDPAN_QUIET": "1"}
    return kept | own | {"LOG_LEVEL": "error", "DEEPSPEED_LOG_LEVEL": "error"}


def tell(name: str, measured: Sequence[Sequence[float]], shares: pl.DataFrame) -> None:
    """Print what was measured."""
    off, again, recorded, logged = np.array(measured).T
    alone = off + again
    print(f"{name}: step {np.median(off) * 1e3:.1f} ms, {len(off)} rounds of 4 blocks of {STEPS} steps")
    for what, ratios in (
        ("ddpan / off", 2 * recorded / alone),
        ("off / off", off / again),
        ("comms logger / off", 2 * logged / alone),
    ):
        print("  step time, {:<20}{:.4f} ({:.4f} to {:.4f})".format(what, *interval(ratios[:, np.newaxis])))
    for op, count, ms, share in shares.iter_rows():
        each = ms / (STEPS + WARM_UP)
        print(f"  recorded {op:<15}{count / (STEPS + WARM_UP):5.1f} a step, {each:6.2f} ms, hidden {share:.0%}")
    sys.stdout.flush()


def main() -> None:
    """Measure the cases asked for; inside torchrun, be one rank of one."""
    parser = argparse.ArgumentParser(description="ZeRO with and without the collector, and with the comms logger.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        rank_main(options)
        return
    print(f"torch {torch.__version__}, 2 ranks, gloo, one thread and one core each; in brackets 95 % intervals")
    for name in CASES if options.case == "all" else [options.case]:
        measure(name, options.rounds, options.seed)


if __name__ == "__main__":
    main()
