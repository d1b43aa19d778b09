"""The command line `postroom`: a thin shell around the handlers; a command loads what it needs when it runs."""
