"""One rank's training: `trainer.train` assembles what the `build_*` functions make; `loop` runs it."""
