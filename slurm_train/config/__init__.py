"""What a run is: schema, composition from words, batch plan, identity. No torch, no submitit."""
