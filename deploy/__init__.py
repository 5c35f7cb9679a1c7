"""How it runs: configuration, command line, supervisor and status."""
