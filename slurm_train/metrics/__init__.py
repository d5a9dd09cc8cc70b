"""What a training run reports: metrics.jsonl and the progress display."""
