"""Who a rank is, and how the ranks agree on one run without a collective."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from ddpan.collector.identity import Identity, agree_on_run, job_of, new_run_id

RANKS = 6


def tcp_stores(_folder: Path) -> list[Store]:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return [server, *(TCPStore("localhost", server.port, is_master=False) for _ in range(RANKS - 1))]


def file_stores(folder: Path) -> list[Store]:
    return [FileStore(str(folder / "store"), RANKS) for _ in range(RANKS)]


def hash_stores(_folder: Path) -> list[Store]:
    return [HashStore()] * RANKS


def prefix_stores(folder: Path) -> list[Store]:
    return [PrefixStore("default_pg", store) for store in tcp_stores(folder)]


def agree(store: Store, proposal: str, *, attempt: str = "3-0", taken: Collection[str] = ()) -> str:
    return agree_on_run(store, attempt=attempt, proposal=proposal, is_taken=taken.__contains__)


@pytest.mark.parametrize("make", [tcp_stores, file_stores, hash_stores, prefix_stores])
def test_all_ranks_agree(make: Callable[[Path], list[Store]], tmp_path: Path) -> None:
    stores = make(tmp_path)
    together = threading.Barrier(RANKS)
    proposals = [f"20261130T205019-{rank:08x}" for rank in range(RANKS)]

    def agree_twice(rank: int) -> list[str]:
        first = agree(stores[rank], f"{proposals[rank]}-0")
        together.wait()
        return [first, agree(stores[rank], f"{proposals[rank]}-1", taken=[first])]

    with ThreadPoolExecutor(RANKS) as pool:
        answers = list(pool.map(agree_twice, range(RANKS)))
    assert all(answer == answers[0] for answer in answers)
    first, second = answers[0]
    assert first in {f"{p}-0" for p in proposals}
    assert second in {f"{p}-1" for p in proposals}


def test_a_rank_that_asks_alone_does_not_wait() -> None:
    assert agree(HashStore(), "mine") == "mine"


def test_a_restarted_job_has_another_run_in_the_same_store() -> None:
    """The store of torchrun's agent outlives the processes."""
    store = HashStore()
    assert [agree(store, f"first-{rank}") for rank in range(3)] == ["first-0"] * 3
    assert [agree(store, f"second-{rank}", attempt="3-1") for rank in range(3)] == ["second-0"] * 3
    assert [agree(store, f"smaller-{rank}", attempt="2-1") for rank in range(2)] == ["smaller-0"] * 2


def test_a_run_that_has_a_log_of_this_rank_already_is_not_this_run() -> None:
    """Nobody counts the groups of a process, and where a node is replaced, torchrun counts no restart."""
    store = HashStore()
    taken = {agree(store, f"first-{rank}") for rank in range(3)}
    assert [agree(store, f"second-{rank}", taken=taken) for rank in range(3)] == ["second-0"] * 3


def test_run_id() -> None:
    moment = datetime(2026, 11, 30, 20, 50, 19, 700_000, tzinfo=timezone.utc).timestamp()
    run = new_run_id(moment)
    assert re.fullmatch(r"20261130T205019-[0-9a-f]{8}", run), run
    assert new_run_id(moment) != run


def test_run_ids_sort_by_time() -> None:
    times = [1796071819.0, 1796071820.0, 1796158220.0, 1827694220.0]
    ids = [new_run_id(t) for t in times]
    assert sorted(ids) == ids


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, (None, 0)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, (None, 0)),
        ({"TORCHELASTIC_RUN_ID": "a1b2", "TORCHELASTIC_RESTART_COUNT": "2"}, ("a1b2", 2)),
        ({"SLURM_JOB_ID": "4711"}, ("4711", 0)),
        ({"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}, ("4711", 1)),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711"}, ("4711", 0)),
        ({"TORCHELASTIC_RUN_ID": "a1b2", "SLURM_JOB_ID": "4711"}, ("a1b2", 0)),
        ({"TORCHELASTIC_RESTART_COUNT": "soon"}, (None, 0)),
    ],
)
def test_job(environ: dict[str, str], job: tuple[str | None, int]) -> None:
    assert job_of(environ) == {"id": job[0], "restart": job[1]}


@pytest.mark.parametrize(
    ("environ", "local_rank"),
    [
        ({"LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "3"}, 0),
        ({}, 5),
        ({"LOCAL_RANK": ""}, 5),
    ],
)
def test_local_rank(environ: dict[str, str], local_rank: int) -> None:
    identity = Identity.of_process(run="r", rank=5, world_size=8, backend="gloo", environ=environ)
    assert identity.local_rank == local_rank
    assert (identity.rank, identity.world_size, identity.backend) == (5, 8, "gloo")
    assert (identity.host, identity.pid) == (socket.gethostname(), os.getpid())
