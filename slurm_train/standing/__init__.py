"""How runs stand: state and reason in words, progress, signs of life, and which rank failed first."""
