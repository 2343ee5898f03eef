"""A CUDA that computes on the host: servers take the CUDA path, graphs included, on a machine without a GPU."""
