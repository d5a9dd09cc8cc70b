"""Attempt supervision and requeue."""
