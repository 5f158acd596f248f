"""What the programs of the command line share: settings, colours, and what is shown while one waits."""
