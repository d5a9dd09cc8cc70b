"""From an environment to a process group and a model spread over it; strangers on the network are kept out."""
