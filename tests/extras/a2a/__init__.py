"""The tests of A2A."""
