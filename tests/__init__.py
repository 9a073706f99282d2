"""Tests, mirroring src. `oracles`, `made_up`, `replay` and `mutants` are what several of them share."""
