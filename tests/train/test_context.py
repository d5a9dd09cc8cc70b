"""A function of one's own on every rank: what it gets and what its return value means."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_train.config.schema import HealthSection, RunConfig, TrainSection
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError, RendezvousError
from slurm_train.train import context
from slurm_train.train.context import TaskContext, run_task
from tests.support.ports import free_port
from tests.support.ranks import leave_group, make_rank

SEEN: list[tuple[TaskContext, float]] = []


@pytest.fixture(autouse=True)
def closed_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        leave_group()


def task(*, context: TaskContext, answer: Any = None) -> Any:
    total = torch.ones(())
    dist.all_reduce(total)
    SEEN.append((context, total.item()))
    return answer


def call(tmp_path: Path, answer: Any) -> int:
    sys.modules["context_task"] = sys.modules[__name__]
    port = free_port()
    config = RunConfig(
        task={"_target_": "context_task.task", "answer": answer}, train=TrainSection(threads=torch.get_num_threads())
    )
    return run_task(make_rank(tmp_path, config, port=port, attempt=2))


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (75, 75), ("done", None)])
def test_the_function_runs_in_an_open_group_and_gives_the_exit_code(
    tmp_path: Path, answer: Any, code: int | None
) -> None:
    SEEN.clear()
    if code is None:
        with pytest.raises(ConfigError, match="returned 'done', which is no exit code"):
            call(tmp_path, answer)
    else:
        assert call(tmp_path, answer) == code
    ((context, total),) = SEEN
    assert (total, context.attempt, context.place.world_size, context.run.path) == (1.0, 2, 1, tmp_path)


def test_a_rank_whose_function_has_failed_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "shutdown", lambda: pytest.fail("they may not come"))
    with pytest.raises(SystemExit) as ended:
        call(tmp_path, 3)
    assert ended.value.code == 3


def test_ranks_with_gpus_need_an_address_for_gloo_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    place = RankPlace.from_env({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    rank = replace(make_rank(device=torch.device("cuda")), place=place)
    with pytest.raises(RendezvousError, match="other nodes could not reach it"):
        rank.join()


@pytest.mark.parametrize(
    ("is_watched", "hang_timeout_s", "timeout_s"),
    [(True, 300.0, 7 * 86400.0), (True, None, 60.0), (False, 300.0, 60.0)],
)
def test_collectives_have_a_time_out_of_their_own_where_nobody_watches_the_ranks(
    is_watched: bool, hang_timeout_s: float | None, timeout_s: float
) -> None:
    config = RunConfig(health=HealthSection(hang_timeout_s=hang_timeout_s))
    assert make_rank(config=config, is_watched=is_watched).collective_timeout_s(60.0) == timeout_s


def test_deterministic_settings_reach_every_library_and_leave_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"NCCL_PROTO": "LL128"}
    monkeypatch.setattr(os, "environ", given)
    try:
        make_rank(
            config=RunConfig(train=TrainSection(deterministic=True, threads=torch.get_num_threads()))
        ).enter_device()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    expected = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(("precision", "products"), [("tf32", "high"), ("float32", "highest")])
def test_products_are_of_tf32_where_that_was_asked_and_nowhere_else(
    precision: Any, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    rank = make_rank(config=RunConfig(train=TrainSection(precision=precision, threads=torch.get_num_threads())))
    assert rank.enter_device().autocast is None
    assert (asked or [torch.get_float32_matmul_precision()]) == [products]
