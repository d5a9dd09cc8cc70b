"""What has to hold of a training that is to be saved: each rule raises an error, or returns notes for the user."""
