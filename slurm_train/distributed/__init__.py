"""From an environment to a process group: place, handshake, rendezvous, group, seeds."""
