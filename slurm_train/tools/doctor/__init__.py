"""What is wrong with a site, an allocation or a node: found before the ranks train, and named in one sentence."""
