"""Sample order, batches, shards and the data sets that ship."""
