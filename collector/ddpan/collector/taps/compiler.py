"""Keeping torch.compile away from the collector.

While compiled code runs, torch.compile looks at every Python function that is called, also at those that the collector
has put into torch's place. Compiled, they would read the clock once and for all, and what they look at would be checked
at each call. So their code is marked: it runs as it is. Where torch.compile follows a call into a function of ours, as
into a collective of ``torch.distributed`` that was replaced, that function asks ``torch.compiler.is_compiling()`` and
steps aside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._C import _dynamo

__all__ = ["hide_from_compiler"]


def hide_from_compiler(package: str, *, alone: Callable[..., Any]) -> None:
    """Mark the code of all functions in the loaded modules of ``package``; nothing where this torch has no such mark.

    A mark is about the function alone: what it calls, such as a hook of the user's, is looked at as before. Only with
    functions that are defined in ``alone`` it extends to everything that they call, which must be nobody else's.
    """
    frames: Any = getattr(_dynamo, "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    inner = set(_codes(alone.__code__)) - {alone.__code__}
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for code in {code for function in _functions(module, name) for code in _codes(function.__code__)}:
                frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip if code in inner else default))


def _functions(owner: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """Functions that were defined in ``module``, methods and properties of its classes included."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module and value is not owner:
            yield from _functions(value, module)
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
