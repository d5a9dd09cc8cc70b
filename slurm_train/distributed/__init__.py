"""From an environment to a process group: place, meeting of the ranks, rendezvous, group, seeds."""
