"""Real servers from registry packages (extra `demo`), for demos, benchmarks and tests; not for production."""
