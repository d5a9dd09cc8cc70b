"""The run directory as a contract: its names, durable writes, attempts, lock and look-up. No torch."""
