"""The tests of workers that call agents of A2A."""
