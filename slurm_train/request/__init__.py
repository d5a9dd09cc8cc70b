"""What Slurm is asked for: the batch script with its flags, arrays of runs, and the submission."""
