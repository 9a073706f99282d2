"""`python -m sparsedp`, and the `sparsedp` command."""

import sys

from sparsedp.cli import main

if __name__ == "__main__":
    sys.exit(main())
