"""`python -m minivllm` is the same as the command `minivllm`."""

from __future__ import annotations

import sys

from minivllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
