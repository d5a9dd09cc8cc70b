"""Tools that stand on the core: each could be deleted with its folder, and only its verb imports it."""
