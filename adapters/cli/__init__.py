"""The command line `postroom`: each command imports only what it needs."""
