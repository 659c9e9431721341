"""The conformance suite for backends, the gate's own and yours.

    asyncgate conformance yours://…                                     or, with every option of pytest:
    python -m pytest --pyargs asyncgate.conformance -p asyncgate.conformance.plugin --backend yours://…

`--backend` is repeatable; `{tmp}` in a URL is a new folder for each test.  Every test has its own tenant, so one shared
database is enough, and `-n auto` is safe.  No test sleeps: the suite moves the backend's `skew`.  `--rounds N` repeats
the crash tests and tries more programs.  plugin.py defines the fixtures (`gate`, `make_gate`, `backend_url`), and
harness.py the gate that tests call.

The invariants, and the tests that check them:

    I1   an acknowledged task is never lost                     test_torture, test_batches, test_races
    I2   a task has at most one live lease                      test_races, test_claim
    I3   fences rise by one with every lease                    test_leases, test_races
    I4   only the holder of the live lease moves a task         test_leases, test_fail, test_permissions
    I5   an expired lease can do nothing                        test_leases, test_expiry, test_races
    I6   attempts rise on failure only, never on expiry         test_fail, test_expiry
    I7   a terminal status never changes                        test_cancel, test_complete, test_races
    I8   each step of a task wrote exactly its receipts         test_receipts, test_complete, test_schedules
    I9   open obligations = created - discharged                test_obligations, test_complete
    I10  one task per (tenant, creator, idempotency key)        test_create, test_batches, test_races
    I11  no tenant sees a byte of another                       test_tenants, test_lists
    I12  a reader that follows a cursor sees each receipt once  test_lists

Further tests: test_permissions (roles and scopes), test_limits, test_waiting (long polls), test_progress and
test_sessions; and test_programs, which runs random programs on the backend and on the oracle of model.py, and compares
the answers.
"""
