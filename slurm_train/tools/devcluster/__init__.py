"""A real Slurm on this one machine, for trying and testing."""
