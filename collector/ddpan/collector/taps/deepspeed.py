"""DeepSpeed: the forward, backward and step of its engines, whatever the stage of ZeRO.

An engine reduces gradients with the collectives of ``torch.distributed``, which the other taps see. ZeRO 0 and 1 do so
after the backward of the last micro-batch, ZeRO 2 and 3 in the backward of each; buckets with a number are those of the
last one, in which the step ends.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .late import LateTap
from .patching import observed
from .reductions import Reduced

if TYPE_CHECKING:
    from ..recording import Recording

__all__ = ["Engines"]

Observer = Callable[[Any], None]


class Engines(LateTap):
    """DeepSpeed's engines of this process."""

    place = ("deepspeed.runtime.engine", "DeepSpeedEngine")

    def _watch(self, watched: Any) -> None:
        observe = self._observer
        around = {
            "forward": (observe(self._before_forward), observe(self._after_forward)),
            "backward": (observe(self._before_backward), observe(self._after_backward)),
            "_backward_prologue": (observe(self._before_backward), None),
            "_backward_epilogue": (observe(self._after_compute), observe(self._after_backward)),
            "step": (observe(self._before_step), observe(self._after_step)),
        }
        for name, (before, after) in around.items():
            self._patches.replace(watched, name, functools.partial(observed, before=before, after=after))

    def _observer(self, observe: Callable[[Recording, Reduced, Any], None]) -> Observer:
        """``observe``, called only for engines that are recorded."""

        def observed(engine: Any) -> None:
            recording = self._session.recording
            if recording is None:
                return
            known = self._reductions.get(engine)
            if known is None:
                if observe != self._before_forward or not torch.is_grad_enabled():
                    return
                known = self._add(engine, recording)
            observe(recording, known, engine)

        return self._session.guard(observed)

    def _add(self, engine: Any, recording: Recording) -> Reduced:
        named = list(engine.module.named_parameters())
        return self._reductions.add(
            engine,
            recording,
            group=_group(engine, [parameter for _, parameter in named]),
            named=named,
            kind="deepspeed",
            name=type(engine.module).__name__,
            zero_stage=int(engine.zero_optimization_stage()),
            holding=functools.partial(_holding, weakref.ref(engine)),
        )

    def _before_forward(self, recording: Recording, known: Reduced, engine: Any) -> None:
        if not torch.is_grad_enabled():
            recording.steps.data_wait_ns = 0
            return
        recording.steps.begin_forward(known.state, synced=_is_boundary(engine))

    def _after_forward(self, recording: Recording, known: Reduced, engine: Any) -> None:
        if torch.is_grad_enabled():
            recording.steps.end_forward(known.state, synced=_is_boundary(engine))

    def _before_backward(self, _recording: Recording, known: Reduced, _engine: Any) -> None:
        self._reductions.begin_backward(known)

    def _after_compute(self, recording: Recording, known: Reduced, _engine: Any) -> None:
        self._reductions.end_compute(recording, known)

    def _after_backward(self, recording: Recording, known: Reduced, _engine: Any) -> None:
        self._reductions.end_backward(recording, known)

    def _before_step(self, recording: Recording, known: Reduced, engine: Any) -> None:
        if _is_boundary(engine):
            recording.steps.begin_optimizer(known.state)

    def _after_step(self, recording: Recording, known: Reduced, _engine: Any) -> None:
        recording.steps.end_optimizer(known.state)


def _group(engine: Any, parameters: Sequence[Any]) -> Any:
    """The group on which the gradients are reduced: under ZeRO-3 the parameters know it."""
    places = (
        *((parameter, "ds_process_group") for parameter in parameters[:1]),
        (engine.optimizer, "dp_process_group"),
        (engine, "seq_data_parallel_group"),
        (engine, "data_parallel_group"),
    )
    groups = (getattr(place, name, None) for place, name in places)
    return next(group for group in groups if isinstance(group, ProcessGroup))


def _is_boundary(engine: Any) -> bool:
    return bool(engine.is_gradient_accumulation_boundary())


def _holding(engine_of: weakref.ref[Any], size_bytes: int) -> list[Any]:
    """The parameters in the bucket of ZeRO 1 to 3 whose reduction has this size, none where that is not one bucket.

    The bucket is emptied after its reduction. Its size is that of its gradients; ZeRO 3 pads each, so that every rank
    gets an equal part. Without ZeRO there are buckets too, and where one is all, it holds all.
    """
    engine = engine_of()
    optimizer = getattr(engine, "optimizer", None)
    buckets = getattr(optimizer, "ipg_buckets", None)
    if engine is None or buckets is None:
        trained = [] if engine is None else [p for p in engine.module.parameters() if p.requires_grad]
        return trained if sum(p.nbytes for p in trained) == size_bytes else []
    found = []
    for dtype, bucket in buckets.items():
        padding = size_bytes // dtype.itemsize - bucket.elements
        most = 0 if hasattr(optimizer, "bit16_groups") else len(bucket.params) * dist.get_world_size()
        if bucket.params and 0 <= padding <= most:
            found.append([_parameter(optimizer, entry) for entry in bucket.params])
    return found[0] if len(found) == 1 else []


def _parameter(optimizer: Any, entry: Any) -> Any:
    """The parameter that an entry of a bucket is, which for ZeRO 1 and 2 holds its group and its place in that."""
    return optimizer.bit16_groups[entry[0]][entry[1]] if isinstance(entry, tuple) else entry
