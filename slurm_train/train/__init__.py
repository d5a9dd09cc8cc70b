"""One rank's training: `build.train` makes a rank's trainer; `trainer.Trainer` runs it."""
