"""Is multi-node worth it? Which runs to time, what they show, and what limits. Imports no torch."""
