"""Is multi-node worth it? Which runs to time, what they say, and what limits. Imports no torch."""
