"""The tests, in the rooms of what they test; what holds for every backend and mode is in conformance/.

    heart/      the law, the engine, settings, and the process around them
    identity/   credentials, roles, limits, audit
    receipts/   ledgers, the outbox, seals, reconciliation
    faces/      REST, MCP, the lease protocol, OpenAPI, the transport
    backends/   SQLite, Postgres, several processes, and the conformance suite itself
    clients/    the Python client, workers, the scheduler
    commands/   the command line and the benchmark
    support/    stand-ins, proxies and programs that the tests start; no tests

In this folder: the repository as a whole, its documents, its package and its image.  `fuzz.py` is a program.
"""
