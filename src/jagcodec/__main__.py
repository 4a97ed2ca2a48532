"""``python -m jagcodec``."""

import sys

from jagcodec.cli import main

if __name__ == "__main__":
    sys.exit(main())
