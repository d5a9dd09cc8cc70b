"""Imported first by a fork server of `multiprocessing`: Slurm's stop signals do not end it before its rank."""

from __future__ import annotations

from slurm_train.session.signals import outlive_stop_signals

outlive_stop_signals()
