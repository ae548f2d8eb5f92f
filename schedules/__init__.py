"""One TOML file per template: its knobs, their ranges, constraints, seeds and effort profiles."""
