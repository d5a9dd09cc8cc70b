"""A few lines per library that make its training a part of a run, by `slurm_train.session`."""
