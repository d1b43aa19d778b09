"""The command line `postroom`: a thin shell around the handlers; each command loads what it needs."""
