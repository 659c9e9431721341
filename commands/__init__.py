"""The command line: one file for each command or group of them, and how their answers look on a terminal."""
