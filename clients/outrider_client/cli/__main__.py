"""`python -m outrider_client.cli`: the `outrider` command."""

import sys

from outrider_client.cli.app import main

sys.exit(main())
