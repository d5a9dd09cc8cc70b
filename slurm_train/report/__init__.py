"""One self-contained page about a run or a sweep: files in, values, markup out. No torch, no network."""
