-- After an incident the access tokens of a tenant that were issued before it are not good any more.
-- code: 1

ALTER TABLE asyncgate.accounts
    ADD COLUMN tokens_since float8;         -- since when an access token must have been issued
