#!/bin/sh
# Run once by the image of Postgres, in a new volume: the role that the gate logs in as, which owns nothing.
set -eu
psql --set ON_ERROR_STOP=1 --set password="$ASYNCGATE_APP_PASSWORD" --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
CREATE ROLE asyncgate_app LOGIN PASSWORD :'password';
SQL
