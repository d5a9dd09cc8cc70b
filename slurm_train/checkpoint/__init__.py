"""Checkpoints that are whole or absent: write, commit, verify, load, prune."""
