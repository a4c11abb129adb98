"""What is replaced is put back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ddpan.collector.taps.patching import Patches


class Static:
    @staticmethod
    def double(x: int) -> int:
        return 2 * x


def wrapped(original: Any) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return replacement


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dist.ProcessGroup, "allreduce"),
        (dist.Work, "wait"),
        (Static, "double"),
        (_SingleProcessDataLoaderIter, "__next__"),
        (dist, "all_reduce"),
    ],
)
def test_the_very_object_that_was_there_is_put_back(owner: Any, name: str) -> None:
    before = dict(vars(owner))
    patches = Patches()
    patches.replace(owner, name, wrapped)
    assert vars(owner)[name] is not before.get(name)
    patches.restore()
    assert dict(vars(owner)) == before
    assert vars(owner).get(name) is before.get(name)


def test_a_method_of_a_compiled_class_still_binds() -> None:
    patches = Patches()
    patches.replace(torch.futures.Future.__bases__[0], "done", wrapped)
    patches.restore()
    assert torch.futures.Future().done() is False


def test_what_is_not_there_is_not_replaced() -> None:
    patches = Patches()
    patches.replace(Static, "treble", wrapped)
    assert not hasattr(Static, "treble")
    patches.restore()
    assert not hasattr(Static, "treble")
