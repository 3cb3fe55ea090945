"""`python -m jaxserve.cli`: the same as `jaxserve`."""

import sys

from jaxserve.cli import main

sys.exit(main())
