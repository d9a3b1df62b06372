"""Source networks: the ones the paper and its benchmarks are about."""
