"""Scaling studies: the runs from one rank to all nodes, and what their times say about adding nodes."""
