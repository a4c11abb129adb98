"""What a recording weighs: bytes on disk per collective, step rows and metadata included, of a real training.

python benchmarks/size.py                     2 ranks, at least 100,000 collectives each
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import polars as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BAR_BYTES: Final = 12.0
LAYERS: Final = 30
WIDTH: Final = 64


def rank_main(steps: int) -> None:
    """What each rank runs: many small buckets, so that many collectives come soon."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = DistributedDataParallel(layers, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(8, WIDTH)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def report(folder: Path) -> None:
    """Print bytes per collective for each rank and table."""
    for rank in sorted(folder.glob("*/rank-*")):
        sizes = {table: sum(p.stat().st_size for p in rank.glob(f"{table}-*")) for table in ("collectives", "steps")}
        rows = {
            table: pl.scan_parquet(rank / f"{table}-*.parquet").select(pl.len()).collect().item() for table in sizes
        }
        everything = sum(path.stat().st_size for path in rank.iterdir())
        per_collective = everything / rows["collectives"]
        verdict = "met" if per_collective <= BAR_BYTES else "not met"
        print(
            f"{rank.name}: {rows['collectives']} collectives, {rows['steps']} steps, {everything} bytes: "
            f"{per_collective:.2f} bytes per collective (collectives {sizes['collectives'] / rows['collectives']:.2f}, "
            f"a step row {sizes['steps'] / rows['steps']:.1f}); bar {BAR_BYTES:g} {verdict}"
        )


def main() -> None:
    """Train, recorded, and weigh the log; inside torchrun, be one rank."""
    parser = argparse.ArgumentParser(description="Bytes on disk per collective.")
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--rank-steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_steps:
        rank_main(options.rank_steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DDPAN_QUIET": "1", "DDPAN_LOG_DIR": folder}
        steps = -(-options.collectives // LAYERS) + 2
        subprocess.run([*launcher, "--rank-steps", str(steps)], check=True, env=environment)
        report(Path(folder))


if __name__ == "__main__":
    main()
