"""The models that ship, and the small protocol through which any model is trained."""
