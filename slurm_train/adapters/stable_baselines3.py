"""Makes the training of a Stable-Baselines3 algorithm a part of its run.

    callback = SessionCallback()  # before the environments are made
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4), seed=0)
    model.learn(100_000, callback=callback)

The state between two rollouts is saved: the algorithm with its policy and optimizers, its replay buffer, the last
observations, and the environments where these are in the rank's own process and can be pickled. Else the episodes that
were under way begin anew, which a line says.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import cloudpickle  # Stable-Baselines3 needs it
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from slurm_train.adapters.boundaries import Boundaries
from slurm_train.adapters.library_names import STABLE_BASELINES3
from slurm_train.session import join

_ALGORITHM = "algorithm.zip"
_BUFFER = "replay_buffer.pkl"
_ENVIRONMENTS = "environments.pkl"


class SessionCallback(BaseCallback):  # type: ignore[misc]  # of an extra
    """Reports, stops, saves and resumes between two rollouts; a step is a step of all environments together.

    Args:
        save_every_steps: steps between two saves; None: at stops and at the end alone.
    """

    def __init__(self, save_every_steps: int | None = None) -> None:
        super().__init__()
        self.session = join()
        self._every = save_every_steps
        self._due_step = 0
        self._begin_step = 0
        self._boundaries = Boundaries(self.session, save=self._save, is_due=self._is_due)

    def _on_training_start(self) -> None:
        STABLE_BASELINES3.check(algorithm=self.model)
        self.session.begin_training()
        checkpoint = self.session.newest()
        if checkpoint is not None:
            self._load(checkpoint.path)
            self.session.restore_random()
        self._begin_step = self.model.num_timesteps
        self._due_step = self._begin_step + (self._every or 0)

    def _on_rollout_start(self) -> None:
        step = self.model.num_timesteps
        if step == self._begin_step:
            return
        numbers = dict(self.logger.name_to_value)
        if "train/loss" in numbers:
            numbers["loss"] = numbers.pop("train/loss")
        self._boundaries.report(step, numbers, max_steps=self.model._total_timesteps)
        self._boundaries.pass_by(step)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        step = self.model.num_timesteps
        if step > self._begin_step:
            self._boundaries.report(step, {}, max_steps=self.model._total_timesteps)
            self._boundaries.end(step)
        else:
            self.session.mark("end")

    def _is_due(self, step: int) -> bool:
        if self._every is None or step < self._due_step:
            return False
        self._due_step = step + self._every
        return True

    def _save(self, step: int) -> None:
        model = self.model
        with self.session.save(step) as folder:
            if self.session.rank == 0:
                model.save(folder / _ALGORITHM)
                if getattr(model, "replay_buffer", None) is not None:
                    model.save_replay_buffer(folder / _BUFFER)
                content = _pickled(model.get_env())
                if content is not None:
                    (folder / _ENVIRONMENTS).write_bytes(content)

    def _load(self, folder: Path) -> None:
        model = self.model
        data, parameters, variables = load_from_zip_file(folder / _ALGORITHM, device=model.device)
        # What is not pickled is as the program has made it: environments, policy, buffers, logger.
        model.__dict__.update({name: value for name, value in (data or {}).items() if name != "start_time"})
        model.set_parameters(parameters, exact_match=True, device=model.device)
        for name, value in (variables or {}).items():
            getattr(model, name).data.copy_(value.data)
        if (folder / _BUFFER).exists():
            model.load_replay_buffer(folder / _BUFFER)
        env = model.get_env()
        if (folder / _ENVIRONMENTS).exists():
            _restore(env, (folder / _ENVIRONMENTS).read_bytes())
        else:
            model._last_obs = env.reset()
            model._last_episode_starts[:] = True
            if self.session.rank == 0:
                print("slurm_train: the environments cannot be saved, so their episodes begin anew", file=sys.stderr)


def _layers(env: Any) -> list[VecEnv]:
    """Returns the environments with those that they wrap, from the outermost on."""
    layers = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    return layers


def _pickled(env: Any) -> bytes | None:
    """Returns the state of all environments, None where they are in other processes or cannot be pickled."""
    layers = _layers(env)
    if type(layers[-1]) is not DummyVecEnv:
        return None
    states = [
        {name: value for name, value in vars(layer).items() if name not in ("venv", "class_attributes")}
        for layer in layers
    ]
    content = io.BytesIO()
    try:
        cloudpickle.dump(states, content)
    except Exception:  # whatever an environment raises that holds a window, a file, a socket
        return None
    return content.getvalue()


def _restore(env: Any, content: bytes) -> None:
    for layer, state in zip(_layers(env), cloudpickle.loads(content), strict=True):
        vars(layer).update(state)
