"""Breaks the recorder in one place after the other, and trains under it each time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpan import collector
from ddpan.collector import clock, collectives, identity, layouts, messages, parts, recording, segments, session, steps
from ddpan.collector.taps import Taps, comm_hook, ddp, group_hooks, scaling

CLASSES: list[type] = [
    clock.Anchor,
    collectives.Collectives,
    ddp.Modules,
    group_hooks.GroupHooks,
    identity.Identity,
    parts.PartWriter,
    recording.Recording,
    segments.Segment,
    segments.Spool,
    steps.ModuleState,
    steps.StepRecorder,
]
"""Recorders through and through: each of their methods may fail."""

PLACES: list[tuple[Any, str]] = [
    (collectives, "_pack"),
    (collectives, "_pack_time"),
    (comm_hook.Hooks, "look_first"),
    (scaling.Scale, "look"),
    (comm_hook.Hooks, "put"),
    (ddp, "describe_module"),
    (ddp, "reduced_parameters"),
    (layouts, "_numbers"),
    (parts, "committed_records"),
    (parts, "write_part"),
    (segments, "pack_header"),
    (session, "agree_on_run"),
    (session, "new_run_id"),
    (session.Session, "_add_group"),
    (session.Session, "group_number"),
    (session.Session, "listen_to"),
    (steps, "_pack"),
    (steps, "_pack_time"),
    (steps, "read_layout"),
    (Taps, "forget"),
    (Taps, "listen_to"),
]
"""Single functions; what is not named does part of DDP's own work, or guards the others."""


def methods(owner: type) -> list[str]:
    functions = (
        name for name, value in vars(owner).items() if isinstance(value, FunctionType | classmethod | property)
    )
    return [name for name in functions if name == "__init__" or not name.startswith("__")]


def broken(*_args: object, **_kwargs: object) -> Any:
    raise ZeroDivisionError("a bug in the recorder")


def train(name: str, midway: Callable[[], object] = lambda: None) -> torch.Tensor:
    """Four steps in a process group of their own; the trained weight."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{sys.argv[1]}/{name}"
    dist.init_process_group("gloo", init_method=store, timeout=timedelta(seconds=20), rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)):
        if step == 2:
            midway()
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        dist.all_reduce(torch.ones(2))
        optimizer.step()
    weight: torch.Tensor = model.module[0].weight.detach().clone()
    # Gloo's threads may still be letting go of tensors; to destroy the group under them hangs torch now and then.
    time.sleep(0.05)
    dist.destroy_process_group()
    return weight


def under(name: str, reference: torch.Tensor, folder: Path, midway: Callable[[], object] = lambda: None) -> Any:
    """What came of a training under a fault."""
    messages._said.clear()
    collected = None
    try:
        collector.start(folder)
        collected = session.current_session()
        same = torch.equal(train(name, midway), reference)
        collector.stop()
    except Exception:
        clean_up(collected)
        return {"raised": traceback.format_exc(), "same": False, "said": []}
    return {"raised": None, "same": same, "said": sorted(messages._said)}


def clean_up(collected: session.Session | None) -> None:
    """Take the collector out by force, lest one fault be seen in the trainings after it."""
    if dist.is_initialized():
        time.sleep(0.2)
        dist.destroy_process_group()
    session._session = None
    if collected is not None and collected._taps is not None:
        collected._taps._patches.restore()


def main() -> None:
    torch.set_num_threads(1)
    reference = train("reference")
    logs = Path(sys.argv[2])
    outcome = {}
    for owner, name in PLACES + [(cls, name) for cls in CLASSES for name in methods(cls)]:
        fault = f"{owner.__name__.removeprefix('ddpan.collector.')}.{name}"
        original = vars(owner)[name]
        setattr(owner, name, property(broken) if isinstance(original, property) else broken)
        outcome[fault] = under(fault, reference, logs / fault)
        setattr(owner, name, original)
    outcome["folder removed"] = under(
        "removed", reference, logs / "removed", lambda: shutil.rmtree(logs / "removed", ignore_errors=True)
    )
    outcome["healthy"] = under("healthy", reference, logs / "healthy")
    Path(sys.argv[1], f"facts-{os.environ['RANK']}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
