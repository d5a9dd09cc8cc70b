"""Trackers get the lines of metrics.jsonl, each in a process of its own beside the ranks; none can touch training."""
