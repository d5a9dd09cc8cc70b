"""What is done with the weights of a checkpoint in place of a training: `evaluate`, `evaluate --follow`, `generate`."""
