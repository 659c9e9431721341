-- AsyncGate on SQLite.  Times are Unix seconds, JSON is text, ids sort by age.
--
-- In this order: tables by topic (the gate, tasks, receipts, schedules, identity, ledger, seals and archive); triggers
-- that protect immutable rows.  The triggers that are the wall between tenants are made for every table by `build_walls`.


-- The gate itself.

CREATE TABLE meta (
    name            TEXT PRIMARY KEY,       -- schema_version, first_migration, cursor_key, instance_id, sign_of_life
    value           TEXT NOT NULL
) WITHOUT ROWID;

-- One row, for the triggers of the wall.  A function in Python instead would be called for each row, and each call
-- would wait for the other Python threads.
CREATE TABLE wall (
    tenant_id       TEXT                    -- of the running transaction, or of the last one
);
INSERT INTO wall VALUES (NULL);


-- Tasks.  From here on every row belongs to a tenant: tenant_id leads each key and each index, except one index, whose
-- comment gives the reason.

CREATE TABLE tenants (                      -- the tenants that have stored anything; upkeep starts here
    tenant_id       TEXT PRIMARY KEY,
    since           REAL NOT NULL           -- of the first write
) WITHOUT ROWID;

CREATE TABLE lanes (                        -- the distinct (type, capabilities) pairs; a claim matches lanes, not tasks
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,       -- 64 bits of SHA-256 over the pair, so that no database must allocate it
    type            TEXT NOT NULL,          -- of the tasks in it
    capabilities    TEXT NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;

CREATE TABLE tasks (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- UUIDv7: its order is the order of creation
    lane            INTEGER NOT NULL,       -- its queue
    type            TEXT NOT NULL,          -- what kind of work it is
    payload         TEXT NOT NULL,          -- JSON, unchanged
    payload_pointer TEXT,                   -- where the payload is stored instead
    requirements    TEXT NOT NULL,          -- JSON, unchanged
    terms           TEXT NOT NULL,          -- JSON: summary, instructions, expectations, timeouts
    owner_kind      TEXT NOT NULL,          -- the creator, for ever (H.1)
    owner_id        TEXT NOT NULL,          -- the creator's id
    principal_ai    TEXT NOT NULL,          -- a label for other systems
    priority        INTEGER NOT NULL,       -- higher comes first
    max_attempts    INTEGER NOT NULL,       -- how often it may fail
    retry_backoff_seconds INTEGER NOT NULL, -- the pause before the first retry
    max_expiries    INTEGER NOT NULL,       -- leases it may lose before it is put on hold; 0: any number
    created_at      REAL NOT NULL,          -- by the gate's clock
    duty            TEXT NOT NULL,          -- its task.assigned receipt
    idempotency_key TEXT,                   -- of the creator
    fingerprint     TEXT,                   -- hash of the request that had the key
    asyncgate_instance TEXT NOT NULL,       -- which gate sweeps it (Clarification C)
    updated_at      REAL NOT NULL,          -- of the last change
    status          TEXT NOT NULL,          -- queued leased running succeeded failed canceled
    attempt         INTEGER NOT NULL,       -- failures so far
    fence           INTEGER NOT NULL,       -- leases so far, plus numbers that a move between databases skipped
    expiries        INTEGER NOT NULL,       -- leases lost so far
    owed            INTEGER NOT NULL,       -- 1 until its duty is discharged
    held            TEXT,                   -- why it is on hold (not offered although queued)
    lost_to         TEXT NOT NULL,          -- JSON array: the workers that lost it
    next_eligible_at REAL,                  -- no lease before this time
    deadline_at     REAL,                   -- when it passes, it is reported once
    started_at      REAL,                   -- when its worker began
    completed_at    REAL,                   -- when it ended
    outcome         TEXT,                   -- JSON: the result or the error
    artifacts       TEXT,                   -- JSON array: where the result is
    ready           INTEGER NOT NULL,       -- 1 if the queue may offer it; set again when its time comes
    handed          TEXT,                   -- JSON, for a ledger with custody, sent with the task's next lease:
                                            -- the fence, the receipt that gave custody back, the receiver
    summary         TEXT,                   -- the beginning of its summary, to be looked for
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_queue ON tasks (tenant_id, lane, priority DESC, task_id) WHERE status = 'queued' AND ready = 1;
CREATE INDEX tasks_delayed ON tasks (tenant_id, next_eligible_at, lane)     -- with the lane: counted without the rows
    WHERE status = 'queued' AND ready = 0 AND held IS NULL;
CREATE INDEX tasks_owner ON tasks (tenant_id, owner_kind, owner_id, task_id);
CREATE INDEX tasks_type ON tasks (tenant_id, type, task_id);
CREATE INDEX tasks_summary ON tasks (tenant_id, summary, task_id) WHERE summary IS NOT NULL;
CREATE INDEX tasks_status ON tasks (tenant_id, status, task_id);
CREATE INDEX tasks_held ON tasks (tenant_id, task_id) WHERE held IS NOT NULL;
CREATE INDEX tasks_deadline ON tasks (tenant_id, deadline_at)
    WHERE deadline_at IS NOT NULL AND status IN ('queued', 'leased', 'running');
CREATE INDEX tasks_spent ON tasks (tenant_id) WHERE status = 'queued' AND attempt >= max_attempts;

CREATE TABLE queues (                       -- how many tasks each lane has: counted by each batch, never scanned
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,
    type            TEXT NOT NULL,          -- of the tasks in it
    capabilities    TEXT NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    queued          INTEGER NOT NULL,       -- tasks that may be claimed, now or later
    held            INTEGER NOT NULL,       -- queued tasks that are on hold
    leased          INTEGER NOT NULL,       -- leased and running ones
    counted_at      REAL NOT NULL,          -- when the numbers last changed
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;

CREATE TABLE leases (                       -- the latest of each task, apart from it: a heartbeat rewrites a narrow row
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lease_id        TEXT NOT NULL,          -- random: only the holder knows it
    worker_kind     TEXT NOT NULL,          -- of the holder
    worker_id       TEXT NOT NULL,          -- of the holder
    worker_instance TEXT,                   -- of the holder, if given
    fence           INTEGER NOT NULL,       -- the number of this lease among the leases of the task
    acquired_at     REAL NOT NULL,          -- when it was granted
    expires_at      REAL NOT NULL,          -- when it expires
    renewals        INTEGER NOT NULL,       -- how often it was renewed
    accepted        TEXT NOT NULL,          -- its task.accepted receipt
    claim_id        TEXT,                   -- the claim's id, if it had one
    ending          TEXT NOT NULL,          -- live completed failed expired released canceled
    ttl_seconds     INTEGER,                -- its length; a renewal extends by the same
    resumed_by      TEXT,                   -- the instance that last resumed it, "" if it gave no name
    resumptions     INTEGER NOT NULL DEFAULT 0,     -- how often it was resumed
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;
CREATE INDEX leases_live ON leases (tenant_id, expires_at) WHERE ending = 'live';
CREATE UNIQUE INDEX leases_id ON leases (tenant_id, lease_id) WHERE ending = 'live';
CREATE INDEX leases_holder ON leases (tenant_id, worker_kind, worker_id, claim_id)
    WHERE ending = 'live';

CREATE TABLE progress (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    progress        TEXT NOT NULL,          -- JSON: the last report, handed to the next worker
    sequence        INTEGER NOT NULL,       -- reports so far
    fence           INTEGER NOT NULL,       -- the lease it was reported under
    updated_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;

CREATE TABLE events (                       -- events of a task that are not receipts (spec 3)
    tenant_id       TEXT NOT NULL,
    event_id        TEXT NOT NULL,          -- UUIDv7
    task_id         TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload         TEXT NOT NULL,          -- JSON
    created_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id, event_id)
) WITHOUT ROWID;


-- Receipts.

-- Receipts lie in the order of their rows and fill one page after another; the key is an index.  In a tree ordered by
-- the key (WITHOUT ROWID) each append would move rows between the last pages.
CREATE TABLE receipts (                     -- immutable: see the triggers
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- UUIDv7: its order is the order of commits
    receipt_key     TEXT NOT NULL,          -- of the logical receipt (H.3)
    receipt_type    TEXT NOT NULL,
    created_at      REAL NOT NULL,
    from_kind       TEXT NOT NULL,          -- the sender
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- the recipient, in whose inbox it is
    to_id           TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- empty if it belongs to no task
    lease_id        TEXT,
    schedule_id     TEXT,
    asyncgate_instance TEXT NOT NULL,       -- the gate that wrote it (20.7)
    hash            TEXT NOT NULL,          -- of its content (Clarification B)
    body            TEXT NOT NULL,          -- canonical JSON
    salt            TEXT NOT NULL DEFAULT '', -- random, for the digest that seals have
    parent_id       TEXT,                   -- its first parent; further ones are edges
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX receipts_key ON receipts (tenant_id, task_id, receipt_key);     -- also finds a task's receipts
CREATE INDEX receipts_to ON receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;

CREATE TABLE edges (                        -- the second and further parents of a receipt
    tenant_id       TEXT NOT NULL,
    child_id        TEXT NOT NULL,
    parent_id       TEXT NOT NULL,
    PRIMARY KEY (tenant_id, child_id, parent_id)
) WITHOUT ROWID;
CREATE INDEX edges_parent ON edges (tenant_id, parent_id, child_id);

CREATE TABLE obligations (                  -- the open ones: an index; the receipts are the evidence
    tenant_id       TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- the creditor
    to_id           TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the receipt that opened it
    PRIMARY KEY (tenant_id, to_kind, to_id, receipt_id)
) WITHOUT ROWID;
CREATE INDEX obligations_age ON obligations (tenant_id, receipt_id);

CREATE TABLE deliveries (                   -- when bootstrap first returned a receipt (H.8)
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    delivered_at    REAL NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;


-- Schedules and presences.

CREATE TABLE schedules (                    -- the last reports of schedulers, to notice missing ones (H.7.4)
    tenant_id       TEXT NOT NULL,
    schedule_id     TEXT NOT NULL,
    owner_kind      TEXT NOT NULL,          -- the principal that requested it
    owner_id        TEXT NOT NULL,
    scheduler_kind  TEXT NOT NULL,          -- the scheduler that runs it
    scheduler_id    TEXT NOT NULL,
    created         TEXT NOT NULL,          -- its schedule.created receipt
    enabled         INTEGER NOT NULL,
    next_run_at     REAL,
    interval_seconds REAL,
    late_at         REAL,                   -- when it counts as late; empty once that was reported
    details         TEXT NOT NULL DEFAULT '{}', -- JSON: its name, type, expression, next runs and last run
    PRIMARY KEY (tenant_id, schedule_id)
) WITHOUT ROWID;
CREATE INDEX schedules_owner ON schedules (tenant_id, owner_kind, owner_id, schedule_id);
CREATE INDEX schedules_late ON schedules (tenant_id, late_at) WHERE late_at IS NOT NULL;

CREATE TABLE presences (                    -- when principals called the gate
    tenant_id       TEXT NOT NULL,
    kind            TEXT NOT NULL,
    id              TEXT NOT NULL,
    instance_id     TEXT,                   -- the last instance seen
    first_seen_at   REAL NOT NULL,
    last_seen_at    REAL NOT NULL,
    sessions        INTEGER NOT NULL,
    claims          TEXT NOT NULL DEFAULT '[]', -- JSON array: its last claim with each of a few profiles
    claimed_at      REAL,                   -- when it last claimed; empty: never
    leased          INTEGER NOT NULL DEFAULT 0, -- leases that it was granted
    completed       INTEGER NOT NULL DEFAULT 0, -- how many of them it completed
    failed          INTEGER NOT NULL DEFAULT 0, -- how many of them it failed
    expired         INTEGER NOT NULL DEFAULT 0, -- how many of them expired
    released        INTEGER NOT NULL DEFAULT 0, -- how many of them it released
    PRIMARY KEY (tenant_id, kind, id)
) WITHOUT ROWID;
CREATE INDEX presences_worker ON presences (tenant_id, kind, id) WHERE claimed_at IS NOT NULL;
CREATE INDEX presences_claimed ON presences (tenant_id, claimed_at) WHERE claimed_at IS NOT NULL;


-- Identity: credentials, tenants' accounts, and the audit log of both.

CREATE TABLE accounts (                     -- a tenant's name, tier, limits and suspension
    tenant_id       TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tier            TEXT NOT NULL,          -- empty is the default
    suspended_at    REAL,                   -- since when all its credentials are refused
    exempt_until    REAL,                   -- from rate limits and quotas (spec 21.4.5)
    exempt_why      TEXT,                   -- the reason for the exemption
    stricter_calls  INTEGER,                -- temporary limit of calls per hour
    stricter_tasks  INTEGER,                -- temporary limit of new tasks per hour
    stricter_until  REAL,                   -- when the temporary limits end
    stricter_why    TEXT,                   -- the reason for the temporary limits
    tokens_since    REAL,                   -- older access tokens are refused, as after an incident
    budgets         TEXT NOT NULL DEFAULT '{}',     -- what may be used in a month, by quantity: JSON
    max_payload_bytes INTEGER,              -- largest payload of a task; null: as the settings say
    max_lease_ttl_seconds INTEGER           -- longest lease; null: as the settings say
) WITHOUT ROWID;

CREATE TABLE api_keys (                     -- issued keys; the secret of a key is never stored
    tenant_id       TEXT NOT NULL,
    key_id          TEXT NOT NULL,          -- part of the key's text; not secret
    hash            TEXT NOT NULL,          -- Argon2id of its secret, as a PHC string
    name            TEXT NOT NULL,          -- a name for people
    principal_kind  TEXT NOT NULL,          -- for whom it stands
    principal_id    TEXT NOT NULL,          -- for whom it stands
    principal_instance_id TEXT,             -- the principal's instance, if given
    role            TEXT NOT NULL,          -- agent worker admin
    scopes          TEXT NOT NULL,          -- JSON array, sorted
    capabilities    TEXT,                   -- JSON array: those it may claim tasks for; NULL is any
    task_types      TEXT,                   -- JSON array: those it may create and claim; NULL is any
    not_before      REAL NOT NULL,          -- when it becomes valid
    expires_at      REAL,                   -- when it expires
    revoked_at      REAL,                   -- when it was revoked
    rotated_to      TEXT,                   -- the key that replaces it
    version         INTEGER NOT NULL,       -- of the hash
    created_at      REAL NOT NULL,          -- when it was issued
    created_by      TEXT NOT NULL,          -- who issued it
    last_used_at    REAL,                   -- within a minute
    places          TEXT,                   -- JSON array: the networks that it was used from, the last one first
    PRIMARY KEY (tenant_id, key_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX api_keys_id ON api_keys (key_id);    -- begins with the id, which says whose it is

CREATE TABLE audit (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    audit_id        TEXT NOT NULL,          -- the number with leading zeros: lines sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    at              REAL NOT NULL,          -- when it happened
    event           TEXT NOT NULL,          -- what happened
    severity        TEXT NOT NULL,          -- info warning critical
    body            TEXT NOT NULL,          -- canonical JSON: who, from where, why
    hash            TEXT NOT NULL,          -- over all of this and the hash of the line before
    PRIMARY KEY (tenant_id, audit_id)
) WITHOUT ROWID;

CREATE TABLE audit_heads (                  -- where each tenant's audit log ends
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last line
    hash            TEXT NOT NULL           -- of the last line
) WITHOUT ROWID;

CREATE TABLE usage (                        -- what a tenant uses of its quotas
    tenant_id       TEXT PRIMARY KEY,
    active          INTEGER NOT NULL,       -- tasks that have not ended
    leases          INTEGER NOT NULL,       -- live leases
    receipt_bytes   INTEGER NOT NULL,       -- size of the bodies of its receipts
    terminal        INTEGER NOT NULL        -- tasks that have ended
) WITHOUT ROWID;

CREATE TABLE meters (                       -- what batches add to a tenant's usage, until it is in an event
    tenant_id       TEXT NOT NULL,
    period          TEXT NOT NULL,          -- number of the five minutes in Unix time, with leading zeros
    slot            TEXT NOT NULL,          -- where a batch counts, apart from other batches; only the sum of all counts
    tasks           INTEGER NOT NULL,       -- created
    leases          INTEGER NOT NULL,       -- by how many the live ones have changed
    lease_ms        INTEGER NOT NULL,       -- each change times the milliseconds of the period at which it came
    receipt_bytes   INTEGER NOT NULL,       -- by how much the stored bodies of receipts have changed
    receipt_moments INTEGER NOT NULL,       -- each change times the seconds of the period at which it came
    payload_bytes   INTEGER NOT NULL,       -- by how much the payloads and outcomes of tasks have changed
    payload_moments INTEGER NOT NULL,       -- as of receipts
    reads           INTEGER NOT NULL,       -- calls
    writes          INTEGER NOT NULL,       -- calls that are no heartbeats
    heartbeats      INTEGER NOT NULL,       -- calls that keep a lease
    PRIMARY KEY (tenant_id, period, slot)
) WITHOUT ROWID;

CREATE TABLE usage_heads (                  -- until when a tenant's usage is in events, and its levels then
    tenant_id       TEXT PRIMARY KEY,
    until           INTEGER NOT NULL,       -- Unix time
    leases          INTEGER NOT NULL,       -- live ones
    receipt_bytes   INTEGER NOT NULL,       -- of stored bodies
    payload_bytes   INTEGER NOT NULL        -- of stored payloads and outcomes
) WITHOUT ROWID;

CREATE TABLE usage_events (                 -- what a tenant used in a time; never changed
    tenant_id       TEXT NOT NULL,
    period          TEXT NOT NULL,          -- number of its first five minutes in Unix time, with leading zeros
    usage_event_id  TEXT NOT NULL,          -- derived from the tenant and the period
    begins          INTEGER NOT NULL,       -- Unix time
    ends            INTEGER NOT NULL,       -- Unix time
    tasks           INTEGER NOT NULL,       -- created
    lease_ms        INTEGER NOT NULL,       -- milliseconds of all leases
    receipt_byte_seconds INTEGER NOT NULL,  -- bytes of bodies times seconds
    payload_byte_seconds INTEGER NOT NULL,  -- bytes of payloads and outcomes times seconds
    reads           INTEGER NOT NULL,       -- calls
    writes          INTEGER NOT NULL,       -- calls that are no heartbeats
    heartbeats      INTEGER NOT NULL,       -- calls that keep a lease
    PRIMARY KEY (tenant_id, period)
);

CREATE TABLE traffic (                      -- what processes did in queues in each minute of the last hour
    tenant_id       TEXT NOT NULL,
    minute          TEXT NOT NULL,          -- of Unix time, with leading zeros
    process         TEXT NOT NULL,          -- a name by chance
    counts          TEXT NOT NULL,          -- JSON: by lane, leases granted, tasks ended, attempts failed, leases expired
    PRIMARY KEY (tenant_id, minute, process)
) WITHOUT ROWID;

CREATE TABLE pauses (                       -- what an admin has paused
    tenant_id       TEXT PRIMARY KEY,
    listed          TEXT NOT NULL           -- JSON, an array: what, since when, until when, by whom, why
) WITHOUT ROWID;

CREATE TABLE bulks (                        -- what is done to many tasks, and how far it is
    tenant_id       TEXT NOT NULL,
    bulk_id         TEXT NOT NULL,
    action          TEXT NOT NULL,
    asked           TEXT NOT NULL,          -- the request for its preview, as JSON
    by_kind         TEXT NOT NULL,
    by_id           TEXT NOT NULL,
    matches         INTEGER NOT NULL,       -- tasks that the preview has counted
    at_least        INTEGER NOT NULL,       -- whether there may be more
    begun_at        REAL NOT NULL,
    updated_at      REAL NOT NULL,
    position        TEXT NOT NULL,          -- the last task that was looked at; newest first
    done            INTEGER NOT NULL,
    skipped         INTEGER NOT NULL,       -- tasks that had changed in between
    refused         INTEGER NOT NULL,
    problem         TEXT,                   -- why the last one was refused
    ended_at        REAL,
    PRIMARY KEY (tenant_id, bulk_id)
);


-- The authorization server.  Its rows stand in the default tenant.

CREATE TABLE oauth_clients (                -- programs that may ask people for access
    tenant_id       TEXT NOT NULL,
    client_id       TEXT NOT NULL,          -- a UUID, or the URL of its metadata document
    origin          TEXT NOT NULL,          -- by an admin, by itself (RFC 7591), by its document
    name            TEXT NOT NULL,          -- as people see it
    redirect_uris   TEXT NOT NULL,          -- JSON array
    scopes          TEXT,                   -- JSON array, the most it may get; null is any
    auth_method     TEXT NOT NULL,          -- how it proves itself at the token endpoint
    secret_hash     TEXT,                   -- SHA-256 of its secret, which has 256 random bits
    document        TEXT,                   -- its metadata document as it was last read
    tenant          TEXT,                   -- whose people may use it; null is everybody
    trusted         INTEGER NOT NULL,       -- whether people are not asked for consent
    pinned          INTEGER NOT NULL,       -- whether its document is never read again
    access_days     INTEGER,                -- life of its access tokens; null: the setting
    created_at      REAL NOT NULL,          -- when
    created_by      TEXT NOT NULL,          -- the principal that registered it
    updated_at      REAL NOT NULL,          -- of a document: when it was last read
    last_used_at    REAL,                   -- when somebody last signed in with it
    disabled_at     REAL,                   -- since when nobody may use it
    PRIMARY KEY (tenant_id, client_id)
);

CREATE TABLE oauth_users (                  -- people who may sign in, or are invited to
    tenant_id       TEXT NOT NULL,
    user_id         TEXT NOT NULL,          -- derived from issuer and subject; of an invitation, from its e-mail address
    issuer          TEXT NOT NULL,          -- the identity provider; empty: invited, or signed in with a link
    subject         TEXT NOT NULL,          -- its name for the person
    email           TEXT NOT NULL,          -- verified, in lower case; empty: unknown
    name            TEXT NOT NULL,          -- shown to people, proves nothing
    tenant          TEXT NOT NULL,          -- that the person belongs to
    principal_kind  TEXT NOT NULL,          -- the person acts as this principal
    principal_id    TEXT NOT NULL,          -- its id
    role            TEXT NOT NULL,          -- of the access tokens
    scopes          TEXT,                   -- JSON array; null: by the role
    access_days     INTEGER,                -- life of access tokens; null: the setting
    admitted_by     TEXT NOT NULL,          -- who or which rule let the person in
    created_at      REAL NOT NULL,          -- when
    last_seen_at    REAL,                   -- when the person last signed in
    disabled_at     REAL,                   -- since when the person may not sign in
    accepted_as     TEXT,                   -- of an invitation: the user who accepted it
    PRIMARY KEY (tenant_id, user_id)
);

CREATE TABLE oauth_consents (               -- what people let programs do
    tenant_id       TEXT NOT NULL,
    user_id         TEXT NOT NULL,          -- the person
    client_id       TEXT NOT NULL,          -- the program
    scopes          TEXT NOT NULL,          -- JSON array
    redirect_uri    TEXT NOT NULL,          -- where the program got its answer; another place needs consent again
    given_at        REAL NOT NULL,          -- when
    PRIMARY KEY (tenant_id, user_id, client_id)
);

CREATE TABLE oauth_grants (                 -- sessions of people with programs
    tenant_id       TEXT NOT NULL,
    grant_id        TEXT NOT NULL,          -- the sid of its access tokens
    user_id         TEXT NOT NULL,          -- the person
    client_id       TEXT NOT NULL,          -- the program
    tenant          TEXT NOT NULL,          -- that its access tokens are for
    principal_kind  TEXT NOT NULL,          -- its access tokens are this principal's
    principal_id    TEXT NOT NULL,          -- its id
    role            TEXT NOT NULL,          -- of its access tokens
    scopes          TEXT NOT NULL,          -- JSON array
    resource        TEXT NOT NULL,          -- the URL that its tokens are for
    redirect_uri    TEXT NOT NULL,          -- of the authorization request; the exchange must repeat it
    challenge       TEXT NOT NULL,          -- S256, base64url
    code_hash       TEXT NOT NULL,          -- SHA-256 of the code
    code_until      REAL NOT NULL,          -- when the code expires
    access_seconds  INTEGER NOT NULL,       -- life of its access tokens
    created_at      REAL NOT NULL,          -- when the person allowed it
    ends_at         REAL NOT NULL,          -- no token of it is valid after that
    code_used_at    REAL,                   -- when the code was exchanged
    refresh_hash    TEXT,                   -- SHA-256 of the refresh token in force
    previous_hash   TEXT,                   -- of the one before, which for a moment gives the same successor again
    seed            TEXT,                   -- what the one in force was derived with from the one before
    rotated_at      REAL,                   -- when that was
    rotations       INTEGER NOT NULL,       -- how often
    place           TEXT NOT NULL,          -- network of the last rotation
    last_used_at    REAL,                   -- when it last gave an access token
    ended_at        REAL,                   -- when it was ended before its time
    ended_why       TEXT,                   -- by whom, or why
    PRIMARY KEY (tenant_id, grant_id)
);

CREATE TABLE oauth_links (                  -- one-time links that sign somebody in
    tenant_id       TEXT NOT NULL,
    link_hash       TEXT NOT NULL,          -- SHA-256 of its secret
    tenant          TEXT NOT NULL,          -- that its user belongs to
    principal_kind  TEXT NOT NULL,          -- its user acts as this principal
    principal_id    TEXT NOT NULL,          -- its id
    role            TEXT NOT NULL,          -- of the access tokens
    scopes          TEXT,                   -- JSON array; null: by the role
    created_at      REAL NOT NULL,          -- when
    ends_at         REAL NOT NULL,          -- until when it signs somebody in
    used_at         REAL,                   -- when it did
    PRIMARY KEY (tenant_id, link_hash)
);

CREATE TABLE revocations (                  -- access tokens that are refused before they expire
    tenant_id       TEXT NOT NULL,
    revocation_id   TEXT NOT NULL,          -- the number, written so that it sorts
    number          INTEGER NOT NULL,       -- 1, 2, 3, …
    kind            TEXT NOT NULL,          -- token, session, client, user, principal or console
    subject         TEXT NOT NULL,          -- the jti, sid, client_id or sub; of a principal its tenant, kind and id
    since           REAL NOT NULL,          -- tokens that were issued before then
    expires_at      REAL NOT NULL,          -- when the last of them has expired anyway
    revoked_at      REAL NOT NULL,          -- when
    revoked_by      TEXT NOT NULL,          -- the principal that did it
    reason          TEXT,                   -- why
    PRIMARY KEY (tenant_id, revocation_id)
);

CREATE TABLE revocation_heads (             -- where the revocations end
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL        -- of the last one
) WITHOUT ROWID;


-- The ledger: receipts to send to a ledger, and receipts that others store here if this gate serves as a ledger.

CREATE TABLE outbox (                       -- written with its receipt, deleted when the ledger has stored it
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the receipt; its skeleton without a body is in receipts
    task_id         TEXT NOT NULL,          -- receipts of one task are sent in order; empty: no task
    content         TEXT NOT NULL,          -- the bytes to send, the same at each attempt
    posted_at       REAL NOT NULL,          -- since when it has been waiting
    state           TEXT NOT NULL,          -- waiting, or parked: refused, and not sent again
    reason          TEXT,                   -- the ledger's last error
    tries           INTEGER NOT NULL,       -- attempts without an answer
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE INDEX outbox_waiting ON outbox (tenant_id, receipt_id) WHERE state = 'waiting';
CREATE INDEX outbox_offered ON outbox (tenant_id, receipt_id) WHERE state = 'offered';

CREATE TABLE ledger (                       -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the author's id: any text
    arrival         TEXT NOT NULL,          -- UUIDv7: its order is the order of commits
    receipt_type    TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- empty if it belongs to no task
    from_kind       TEXT NOT NULL,          -- the sender
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- the recipient, in whose inbox it is
    to_id           TEXT NOT NULL,
    asyncgate_instance TEXT NOT NULL,       -- the gate that wrote it (20.7); empty if none did
    digest          TEXT NOT NULL,          -- of its content
    content         TEXT NOT NULL,          -- JSON, unchanged
    stated_kind     TEXT NOT NULL DEFAULT '',   -- kind of the principal that stored it; empty: unknown
    stated_id       TEXT NOT NULL DEFAULT '',   -- the id of that principal
    stated_role     TEXT NOT NULL DEFAULT '',   -- the role of that credential
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON ledger (tenant_id, asyncgate_instance, arrival);

CREATE TABLE ledger_marks (                 -- how far a ledger was read for receipts of workers
    tenant_id       TEXT NOT NULL,
    name            TEXT NOT NULL,          -- the receipt type, or an adopted receipt's id
    receipt_id      TEXT NOT NULL,          -- the last receipt read, or the receipt's other id
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;


-- Webhooks: where tenants are told of their events.

CREATE TABLE webhooks (                     -- endpoints, and how far their events are delivered
    tenant_id       TEXT NOT NULL,
    webhook_id      TEXT NOT NULL,
    url             TEXT NOT NULL,          -- where events are posted
    description     TEXT NOT NULL,          -- for people
    types           TEXT NOT NULL,          -- JSON array of event types; empty: every receipt
    principals      TEXT NOT NULL,          -- JSON array: only receipts to these ids; empty: to anybody
    secret_id       TEXT NOT NULL,          -- the signing secret is derived from it and the gate's secret
    previous_id     TEXT,                   -- the same for the signing secret before
    previous_until  REAL,                   -- until when that one signs, too
    position        TEXT NOT NULL,          -- every receipt up to it is delivered, or has a row in webhook_deliveries
    state           TEXT NOT NULL,          -- active disabled parked removing
    reason          TEXT,                   -- why it is not active, or why it fails
    created_at      REAL NOT NULL,          -- when
    created_by      TEXT NOT NULL,          -- by which principal
    updated_at      REAL NOT NULL,          -- when an admin last changed it
    failing_since   REAL,                   -- since when no delivery has succeeded
    noticed_at      REAL,                   -- when admins were last told of a parked delivery
    succeeded_at    REAL,                   -- the last success
    reached         TEXT,                   -- JSON, of an endpoint for all tenants: by tenant, the position in its usage
    PRIMARY KEY (tenant_id, webhook_id)
);

CREATE TABLE webhook_heads (                -- how many endpoints a tenant has
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE webhook_deliveries (           -- what became of each event
    tenant_id       TEXT NOT NULL,
    webhook_id      TEXT NOT NULL,          -- the endpoint
    delivery_id     TEXT NOT NULL,          -- of the event; the same at each attempt
    type            TEXT NOT NULL,          -- of the event
    task_id         TEXT NOT NULL,          -- events of one task are delivered in order; empty: no task
    state           TEXT NOT NULL,          -- waiting delivered parked
    tries           INTEGER NOT NULL,       -- attempts
    first_at        REAL NOT NULL,          -- when it was first due
    last_at         REAL,                   -- the last attempt
    next_at         REAL,                   -- the next attempt, while it waits
    http_status     INTEGER,                -- of the last answer
    reason          TEXT,                   -- why the last attempt failed
    took_ms         REAL,                   -- how long the last attempt took
    of_tenant       TEXT,                   -- whose event it is, unless the endpoint's own tenant's
    PRIMARY KEY (tenant_id, webhook_id, delivery_id)
) WITHOUT ROWID;
CREATE INDEX webhook_deliveries_state ON webhook_deliveries (tenant_id, webhook_id, state, delivery_id);


-- Seals and archive.  Seals reveal a receipt that was changed, added or deleted without the gate.  The archive (H.11)
-- moves receipts into segment files, and a pointer stays.

CREATE TABLE seals (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    seal_id         TEXT NOT NULL,          -- the number with leading zeros: seals sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    last_id         TEXT NOT NULL,          -- the last receipt that it covers
    count           INTEGER NOT NULL,       -- number of receipts
    digest          TEXT NOT NULL,          -- SHA-256 over the digests of the receipts, in their order
    marks           TEXT NOT NULL,          -- base64: the first bytes of each digest
    late            TEXT NOT NULL,          -- JSON array: its receipts, if they are older than sealed ones
    sealed_at       REAL NOT NULL,          -- when
    hash            TEXT NOT NULL,          -- over all of this and the hash of the seal before
    PRIMARY KEY (tenant_id, seal_id)
);

CREATE TABLE seal_heads (                   -- where each tenant's seals end
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last seal
    last_id         TEXT NOT NULL,          -- of the last seal
    hash            TEXT NOT NULL,          -- of the last seal
    imports         INTEGER NOT NULL        -- how often receipts were imported or restored
) WITHOUT ROWID;

CREATE TABLE archived (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the archived receipt
    task_id         TEXT NOT NULL,          -- of that receipt
    receipt_type    TEXT NOT NULL,          -- of that receipt
    segment         TEXT NOT NULL,          -- the file, within the archive's folder
    line            INTEGER NOT NULL,       -- its line in the file
    digest          TEXT NOT NULL,          -- of every byte of the receipt, so that seals can still be verified
    chain           TEXT NOT NULL,          -- the oldest receipt that moved with it
    tasks           TEXT NOT NULL,          -- JSON array: the tasks that moved with it
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;
CREATE INDEX archived_task ON archived (tenant_id, task_id, receipt_id);


-- Erasure (spec 21.12.1): while one is open, and only then, declared columns of rows that never change otherwise may be
-- emptied or replaced by pseudonyms; see the triggers.

CREATE TABLE erasures (                     -- one that has ended never changes: see the triggers
    tenant_id       TEXT NOT NULL,
    erasure_id      TEXT NOT NULL,          -- UUIDv7
    of_tenant       TEXT NOT NULL,          -- whose data; in the operator's tenant it may be another one
    principal_kind  TEXT NOT NULL,          -- whose data; empty: of the whole tenant
    principal_id    TEXT NOT NULL,          -- the same; at the end its pseudonym
    names           TEXT NOT NULL,          -- JSON array: what else names the principal; empty at the end
    key             TEXT NOT NULL,          -- that makes the pseudonyms; empty at the end
    step            TEXT NOT NULL,          -- what is done now
    segments        TEXT NOT NULL,          -- JSON array: files of the archive to delete
    counts          TEXT NOT NULL,          -- JSON: by table, how many rows were changed and deleted
    begun_at        REAL NOT NULL,
    ended_at        REAL,                   -- when its key was destroyed
    digest          TEXT NOT NULL,          -- SHA-256 over the rows of erased, in their order
    proof           TEXT,                   -- a signature over all of that (JWS), if the gate has a key that signs
    PRIMARY KEY (tenant_id, erasure_id)
) WITHOUT ROWID;

CREATE TABLE erased (                       -- append-only: the rows that an erasure has changed
    tenant_id       TEXT NOT NULL,
    source          TEXT NOT NULL,          -- receipts, audit or ledger
    row_id          TEXT NOT NULL,          -- the receipt, the line or the arrival
    erasure_id      TEXT NOT NULL,          -- the first one that has changed it
    before          TEXT NOT NULL,          -- the digest that seals, or the chain of the audit log, have of it
    kept            TEXT NOT NULL,          -- SHA-256 over the columns that no erasure changes
    PRIMARY KEY (tenant_id, source, row_id)
) WITHOUT ROWID;


-- What may not change.  None of these rows is ever updated, but for an erasure, which only takes content away; some are
-- deleted, in the cases that the conditions name.
-- INSERT OR REPLACE deletes without asking the triggers of a DELETE: hence the triggers called `once`.

CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'receipts' AND e.row_id = OLD.receipt_id
            AND (NEW.body = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}'
                 OR NEW.body = '' AND OLD.body = '')
            AND NEW.salt = ''
            AND (u.principal_kind = '' OR OLD.body LIKE '{"erased":"' || u.erasure_id || '"%'
                 OR u.principal_id IN (OLD.from_id, OLD.to_id) OR instr(OLD.body, u.principal_id)
                 OR EXISTS (SELECT 1 FROM receipts AS r
                            WHERE r.tenant_id = OLD.tenant_id AND r.task_id = OLD.task_id AND OLD.task_id <> ''
                                AND r.receipt_type = 'task.assigned'
                                AND (r.from_id = u.principal_id OR r.body LIKE '{"erased":"' || u.erasure_id || '"%')))
            AND (NEW.from_id = OLD.from_id OR NEW.from_id LIKE 'erased-%')
            AND (NEW.to_id = OLD.to_id OR NEW.to_id LIKE 'erased-%')
            AND (NEW.schedule_id IS OLD.schedule_id OR NEW.schedule_id LIKE 'erased-%'))
        OR (NEW.tenant_id, NEW.receipt_id, NEW.receipt_type, NEW.created_at, NEW.from_kind, NEW.to_kind, NEW.task_id,
            NEW.lease_id, NEW.asyncgate_instance, NEW.parent_id)
        IS NOT (OLD.tenant_id, OLD.receipt_id, OLD.receipt_type, OLD.created_at, OLD.from_kind, OLD.to_kind,
                OLD.task_id, OLD.lease_id, OLD.asyncgate_instance, OLD.parent_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_stay BEFORE UPDATE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER events_stay BEFORE UPDATE ON events
    WHEN NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                     AND NEW.payload = '{"erased":"' || erasure_id || '"}')
        OR (NEW.tenant_id, NEW.event_id, NEW.task_id, NEW.event_type, NEW.created_at)
        IS NOT (OLD.tenant_id, OLD.event_id, OLD.task_id, OLD.event_type, OLD.created_at)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER archived_stay BEFORE UPDATE ON archived BEGIN SELECT RAISE(ABORT, 'pointers are append-only'); END;
CREATE TRIGGER seals_stay BEFORE UPDATE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER usage_events_stay BEFORE UPDATE ON usage_events
    BEGIN SELECT RAISE(ABORT, 'usage events are append-only'); END;
CREATE TRIGGER ledger_stay BEFORE UPDATE ON ledger
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'ledger' AND e.row_id = OLD.arrival
            AND NEW.content = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}'
            AND (NEW.receipt_id = OLD.receipt_id OR NEW.receipt_id LIKE 'erased-%')
            AND (NEW.from_id = OLD.from_id OR NEW.from_id LIKE 'erased-%')
            AND (NEW.to_id = OLD.to_id OR NEW.to_id LIKE 'erased-%')
            AND (NEW.stated_id = OLD.stated_id OR NEW.stated_id LIKE 'erased-%'))
        OR (NEW.tenant_id, NEW.arrival, NEW.receipt_type, NEW.task_id, NEW.from_kind, NEW.to_kind,
            NEW.asyncgate_instance, NEW.stated_kind, NEW.stated_role)
        IS NOT (OLD.tenant_id, OLD.arrival, OLD.receipt_type, OLD.task_id, OLD.from_kind, OLD.to_kind,
                OLD.asyncgate_instance, OLD.stated_kind, OLD.stated_role)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
-- Of a line of the audit log, members may go or become pseudonyms; none may come or say something else.
CREATE TRIGGER audit_stay BEFORE UPDATE ON audit
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'audit' AND e.row_id = OLD.audit_id
            AND json_extract(NEW.body, '$.erased') = e.erasure_id)
        OR EXISTS (SELECT 1 FROM json_each(NEW.body) AS n WHERE n.key <> 'erased' AND n.value NOT LIKE 'erased-%'
                   AND n.value IS NOT (SELECT o.value FROM json_each(OLD.body) AS o WHERE o.key = n.key))
        OR (NEW.tenant_id, NEW.audit_id, NEW.number, NEW.at, NEW.event, NEW.severity, NEW.hash)
        IS NOT (OLD.tenant_id, OLD.audit_id, OLD.number, OLD.at, OLD.event, OLD.severity, OLD.hash)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER erased_stay BEFORE UPDATE ON erased BEGIN SELECT RAISE(ABORT, 'what was erased stays noted'); END;
CREATE TRIGGER erased_keep BEFORE DELETE ON erased BEGIN SELECT RAISE(ABORT, 'what was erased stays noted'); END;
CREATE TRIGGER erasures_stay BEFORE UPDATE ON erasures WHEN OLD.ended_at IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'an erasure that has ended stays as it is'); END;
CREATE TRIGGER erasures_keep BEFORE DELETE ON erasures BEGIN SELECT RAISE(ABORT, 'erasures stay noted'); END;

CREATE TRIGGER seals_once BEFORE INSERT ON seals
    WHEN EXISTS (SELECT 1 FROM seals WHERE tenant_id = NEW.tenant_id AND seal_id = NEW.seal_id)
    BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_keep BEFORE DELETE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER ledger_once BEFORE INSERT ON ledger
    WHEN EXISTS (SELECT 1 FROM ledger WHERE tenant_id = NEW.tenant_id AND receipt_id = NEW.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_keep BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER audit_once BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE tenant_id = NEW.tenant_id AND audit_id = NEW.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

-- A line of the audit log goes when it is the oldest and at least 90 days old (spec 21.7.4).  Another line in the log
-- says where it begins now.
CREATE TRIGGER audit_keep BEFORE DELETE ON audit
    WHEN OLD.at > strftime('%s', 'now') - 90 * 86400
        OR EXISTS (SELECT 1 FROM audit WHERE tenant_id = OLD.tenant_id AND audit_id < OLD.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only, and kept for 90 days at least'); END;

-- A receipt may be deleted when its pointer exists, a pointer when its receipt is restored, and a settled task with its
-- events when the task has no receipts any more.
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_keep BEFORE DELETE ON edges
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.child_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER archived_keep BEFORE DELETE ON archived
    WHEN NOT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'a pointer stays until its receipt is back'); END;
CREATE TRIGGER tasks_keep BEFORE DELETE ON tasks
    WHEN OLD.status IN ('queued', 'leased', 'running') OR OLD.owed
        OR EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
        AND NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                        AND (principal_kind = '' OR (principal_kind, principal_id) = (OLD.owner_kind, OLD.owner_id)))
    BEGIN SELECT RAISE(ABORT, 'only a settled task whose receipts are in the archive goes'); END;
-- A key may be deleted when it is revoked, in the erasure of whom it stands for.
CREATE TRIGGER api_keys_keep BEFORE DELETE ON api_keys
    WHEN OLD.tenant_id IS (SELECT tenant_id FROM wall)
        AND (OLD.revoked_at IS NULL
             OR NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                            AND (principal_kind = ''
                                 OR (principal_kind, principal_id) = (OLD.principal_kind, OLD.principal_id))))
    BEGIN SELECT RAISE(ABORT, 'a key stays until who it stands for is erased'); END;
CREATE TRIGGER events_keep BEFORE DELETE ON events
    WHEN EXISTS (SELECT 1 FROM tasks WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
