"""A Stable-Baselines3 algorithm in a run goes on where it was stopped, bit for bit, with its environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.loops import Train, losses, undisturbed_and_stopped
from tests.support.extras import NEEDS_STABLE_BASELINES3

pytestmark = [NEEDS_STABLE_BASELINES3, pytest.mark.filterwarnings("ignore"), pytest.mark.full]


def training(kind: str, *, in_processes: bool = False) -> Train:
    """Returns a program that trains with an algorithm."""

    def train(_: Any, at_step: Callable[[int], None]) -> None:
        import stable_baselines3
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

        from slurm_train.adapters.stable_baselines3 import SessionCallback

        class Count(BaseCallback):  # type: ignore[misc]  # Any: not installed everywhere
            def _on_step(self) -> bool:
                at_step(self.num_timesteps)
                return True

        callback = SessionCallback()
        env_kind = SubprocVecEnv if in_processes else DummyVecEnv
        env = make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=env_kind)
        settings = {
            "PPO": {"n_steps": 32, "batch_size": 16, "n_epochs": 2},
            "DQN": {"learning_starts": 40, "train_freq": 8, "buffer_size": 500, "batch_size": 16},
        }[kind]
        algorithm = getattr(stable_baselines3, kind)
        model = algorithm("MlpPolicy", VecNormalize(env), seed=0, device="cpu", verbose=0, **settings)
        model.learn(384, callback=[Count(), callback], log_interval=1)
        env.close()

    return train


@pytest.mark.parametrize("kind", ["PPO", "DQN"])
def test_an_algorithm_goes_on_where_it_was_stopped(tmp_path: Path, kind: str) -> None:
    undisturbed, stopped = undisturbed_and_stopped(tmp_path, training(kind), stop_at=150)
    found = losses(stopped)
    assert found == losses(undisturbed)
    assert len(found) > 4
    assert max(found) >= 320


def test_environments_in_other_processes_begin_their_episodes_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, stopped = undisturbed_and_stopped(tmp_path, training("PPO", in_processes=True), stop_at=150)
    assert max(losses(stopped)) >= 320
    assert "episodes begin anew" in "".join(capfd.readouterr())
