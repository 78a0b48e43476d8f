"""`python -m recnets` is the `recnet` command."""

import os
import sys

from recnets.cli.main import main

if __name__ == "__main__":
    status = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Gloo's threads may outlive their group, and what a process cleans up at its end then aborts it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
