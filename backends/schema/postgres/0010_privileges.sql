-- Who owns what and may do what, as each migration left it: a dump carries this along, the roles it does not.
-- code: 1

ALTER TABLE asyncgate.migrations
    ADD COLUMN privileges text[];           -- the statements that make it so; nobody but the owner may write them
