"""The command line: one module a command, mounted by `recnets.cli.main`."""
