"""The rows of `make gpu-check`: one module per family, the runner and the table."""
