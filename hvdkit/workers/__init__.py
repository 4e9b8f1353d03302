"""Scripts that run once a rank, for the builder, the probes and the tests."""
