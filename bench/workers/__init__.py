"""What runs inside a worker process: one module per kind of contender, each with `load` and `build`."""
