"""What a run tells while it trains: metrics.jsonl, the progress display, TensorBoard."""
