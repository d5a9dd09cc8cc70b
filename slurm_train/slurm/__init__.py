"""What Slurm is: node lists, allocations, states, and the one module that runs its commands."""
