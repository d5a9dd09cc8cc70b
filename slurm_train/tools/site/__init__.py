"""What `init` does: from what Slurm says about a cluster to a site file for it."""
