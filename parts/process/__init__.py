"""What a process of the gate has: options, log, loops, its way out, who waits and who was here; knows only words."""
