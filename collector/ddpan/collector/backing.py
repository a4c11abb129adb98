"""The bytes of a spool segment: memory of the process's own, and a copy of it in a file.

A store into a mapped file cannot report an error: where the file was truncated, or its disk broke, went read-only or
had less room than it promised, the process gets SIGBUS and ends. So the recorder stores into memory that nobody else
can shrink, and has the kernel copy what it stored into the mapping of the file. That is a system call, which returns an
error instead. What it copied is in the page cache, as after a store: no disk is waited for, and a kill loses nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["Backing"]

_CHUNK_BYTES: Final = 1 << 16
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _copier() -> Callable[[int, int, int, int], int]:
    # `os.preadv` would let go of the interpreter at each call, and get it back when others are done with it.
    pread = ctypes.PyDLL(None).pread
    pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
    pread.restype = ctypes.c_ssize_t
    return pread


_copy: Final = _copier()


class Backing:
    """Memory of a fixed size and the file that it is copied to.

    Args:
        path: the file; it is made, and has this name once ``header`` is in it.
        size: bytes.
        header: the first bytes.

    Attributes:
        map: the memory.
        unkept: copies that failed since the file was made or mended; a kill would lose what they held.

    Raises:
        OSError: the file or the memory cannot be made.
    """

    def __init__(self, path: Path, size: int, header: bytes) -> None:
        self.unkept = 0
        self._path = path
        self._size = size
        self._descriptor, self.map = _own_memory(path.name, size)
        # Not at exit, when threads of a process group may still call.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.map[: len(header)] = header
        self._write_file(len(header))

    def keep(self, offset: int, size: int) -> None:
        """Copy ``size`` bytes at ``offset`` into the file."""
        if _copy(self._descriptor, self._address + offset, size, offset) != size:
            self.unkept += 1

    def is_whole(self) -> bool:
        """Whether the file is there under its name and as long as it should be, and every copy went into it."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return self.unkept == 0 and found.st_size == self._size and found.st_ino == self._inode

    def mend(self) -> None:
        """Write the file anew from memory.

        Raises:
            OSError: the file cannot be made.
        """
        self._write_file(self._size)
        self.unkept = 0

    def _write_file(self, used: int) -> None:
        """Make the file with the first ``used`` bytes of the memory in it; the others are zero."""
        draft = self._path.with_name(f".{self._path.name}.tmp")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
            self._inode = os.fstat(descriptor).st_ino
            self._use(mmap.mmap(descriptor, self._size), used)
            draft.rename(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _use(self, mapped: mmap.mmap, used: int) -> None:
        """Copy into this mapping from now on, and what there is already."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped = mapped
        for offset in range(0, used, _CHUNK_BYTES):
            # The interpreter is held in each copy: none of them overtakes a newer one of another thread.
            size = min(_CHUNK_BYTES, used - offset)
            if _copy(self._descriptor, self._address + offset, size, offset) != size:
                raise OSError(f"{self._path} cannot be written")


def _own_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Memory that cannot change its size, and its descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, mmap.mmap(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
