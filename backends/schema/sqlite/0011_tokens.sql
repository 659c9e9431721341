-- After an incident the access tokens of a tenant that were issued before it are not good any more.

ALTER TABLE accounts ADD COLUMN tokens_since REAL;      -- since when an access token must have been issued
