"""The command line: one file for each command or group, and the formatting of their output."""
