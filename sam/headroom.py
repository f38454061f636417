"""The command `python -m sam.headroom`: sam.replay.headroom."""

import sys

from sam.replay.headroom import main

if __name__ == "__main__":
    sys.exit(main())
