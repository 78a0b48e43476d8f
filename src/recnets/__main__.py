"""`python -m recnets` is the `recnet` command."""

from recnets.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
