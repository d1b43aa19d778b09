"""The command line, `postroom`: a thin shell around the handlers. Modules load what they need when a command runs."""
