"""The Python client of Outrider, and the `outrider` command."""
