"""What a gate can do without, a folder each: code, operations and commands, joined by its extra.py."""
