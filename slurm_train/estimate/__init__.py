"""What a run will need before it starts: memory, speed, GPU hours, and what it may lose. Imports no torch."""
