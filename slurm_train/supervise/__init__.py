"""Stopping politely and coming back."""
