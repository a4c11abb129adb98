"""Trains under a recorder one of whose functions raises, in each step anew, then under one where the next does.

The functions are all those of the collector that a healthy training was seen to call, closures included, in the
training's thread and in the background; so what is new in the collector is among them. Arguments: a folder for files,
one for logs, and the names of functions that are left out.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpan import collector
from ddpan.collector import autoload, messages, session

PACKAGE = str(Path(collector.__file__).parent)
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Trace = Callable[[FrameType, str, Any], Any]


def training(name: str, trace: Trace | None = None) -> torch.Tensor:
    """Four steps in a process group of their own, with what else may be recorded; the trained weight."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[1]}/{name}",
        timeout=timedelta(seconds=150),
        rank=RANK,
        world_size=WORLD_SIZE,
    )
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + RANK)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)):
        sys.settrace(trace)  # A trace that raised is taken out.
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                model(batch).square().sum().backward()
        model(batch).square().sum().backward()
        dist.all_reduce(torch.ones(2), group=pair)
        optimizer.step()
    with torch.no_grad():
        model(batch)
    weight: torch.Tensor = model.module[0].weight.detach().clone()
    # Gloo's threads may still be letting go of tensors; to destroy the group under them hangs torch now and then.
    time.sleep(0.02)
    dist.destroy_process_group(pair)
    dist.destroy_process_group()
    return weight


def recorded(name: str, trace: Trace) -> torch.Tensor:
    """A training from start to stop of the collector, traced."""
    os.environ["DDPAN_LOG_DIR"] = str(Path(sys.argv[2], name))
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        autoload.activate()
        weight = training(name, trace)
        collector.stop()
        return weight
    finally:
        sys.settrace(None)
        threading.settrace(None)


def called() -> list[CodeType]:
    """The collector's functions that a healthy training calls."""
    seen: dict[CodeType, None] = {}

    def trace(frame: FrameType, _event: str, _argument: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            seen.setdefault(frame.f_code)

    recorded("healthy", trace)
    return list(seen)


def first_risky_line(code: CodeType) -> int:
    """Where a mistake is put: the first line, or the first that the function itself takes care of."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    tries = [node for node in own_nodes(function) if isinstance(node, ast.Try) and catches_all(node)]
    return code.co_firstlineno - 1 + min((node.body[0].lineno for node in tries), default=0)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions defined in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from own_nodes(node)


def catches_all(node: ast.Try) -> bool:
    return any(isinstance(handler.type, ast.Name) and handler.type.id == "Exception" for handler in node.handlers)


def raising(code: CodeType) -> Trace:
    """Raises in a call of ``code``."""
    line = first_risky_line(code)

    def inside(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and frame.f_lineno >= line:
            raise ZeroDivisionError("a bug in the recorder")
        return inside

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        return inside if frame.f_code is code else None

    return trace


def under(name: str, code: CodeType, reference: torch.Tensor) -> dict[str, Any]:
    """What came of a training under a function that raises."""
    messages._said.clear()
    collected = None
    try:
        same = torch.equal(recorded(name, raising(code)), reference)
    except Exception:
        collected = session.current_session()
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


def of_all_ranks(names: list[str]) -> list[str]:
    """What every rank has, in one order; trainings have to be the same on all of them."""
    Path(sys.argv[1], f"called-{RANK}.json").write_text(json.dumps(names))
    training("meeting")
    everybodys = [json.loads(Path(sys.argv[1], f"called-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return sorted(set(everybodys[0]).intersection(*everybodys))


def name_of(code: CodeType) -> str:
    """Module, function and line: several functions of a module may have one name."""
    path = Path(code.co_filename)
    return f"{path.parent.name if path.stem == '__init__' else path.stem}.{code.co_name}:{code.co_firstlineno}"


def main() -> None:
    torch.set_num_threads(1)
    reference = training("reference")
    codes = {name_of(code): code for code in called()}
    said = sorted(messages._said)
    chosen = [name for name in of_all_ranks(list(codes)) if name.rpartition(":")[0] not in sys.argv[3:]]
    outcome: dict[str, Any] = {name: under(name, codes[name], reference) for name in chosen}
    outcome["healthy"] = {"raised": None, "same": True, "said": said}
    Path(sys.argv[1], f"facts-{RANK}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
