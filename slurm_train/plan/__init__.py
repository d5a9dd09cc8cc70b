"""From a configuration to a plan: ranks, batch, CPUs, memory, speed, and what a person is told of it."""
