-- A lost lease of an instance that has died is taken back at once, not when its beats have been missed.
-- code: 1

-- As `overdue`, which the servers of the release before go on calling.  A lease that ran out is left to its owner only
-- while that holds its lock (`holding`); what else is due is left to those who gave a sign of life (`living`).  A row of
-- the kind `others` says that such a lease has been left to its owner, who may die meanwhile.
CREATE FUNCTION asyncgate.overdue_but(now_at float8, lost_at float8, living text[], holding text[], most int)
RETURNS TABLE (tenant_id uuid, kind text, id text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    late record;
BEGIN
    -- Leases that were renewed since: upkeep looks at them again when they run out.
    FOR late IN
        SELECT tenant_id, task_id, least(CASE WHEN status IN ('leased', 'running') THEN expires_at END,
                                         deadline_at) AS next_at
        FROM asyncgate.states
        WHERE check_at <= now_at AND (deadline_at IS NULL OR deadline_at > now_at)
            AND CASE WHEN status IN ('leased', 'running') THEN expires_at > check_at
                     ELSE status <> 'queued' OR attempt < max_attempts END
        ORDER BY check_at LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE asyncgate.states SET check_at = late.next_at
        WHERE tenant_id = late.tenant_id AND task_id = late.task_id;
    END LOOP;
    RETURN QUERY (
        SELECT s.tenant_id, 'task', s.task_id::text FROM asyncgate.states AS s
        WHERE s.check_at <= now_at
            AND (s.status IN ('leased', 'running') AND s.expires_at <= lost_at AND s.asyncgate_instance <> ALL (holding)
                 OR (s.deadline_at <= now_at OR s.status = 'queued' AND s.attempt >= s.max_attempts)
                    AND s.asyncgate_instance <> ALL (living))
        ORDER BY s.check_at LIMIT most);
    RETURN QUERY (
        SELECT s.tenant_id, 'others', s.task_id::text FROM asyncgate.states AS s
        WHERE s.check_at <= now_at AND s.status IN ('leased', 'running') AND s.expires_at <= lost_at
            AND array_position(holding, s.asyncgate_instance::text) IS NOT NULL
        ORDER BY s.check_at LIMIT 1);
    RETURN QUERY (
        SELECT s.tenant_id, 'schedule', s.schedule_id::text FROM asyncgate.schedules AS s
        WHERE s.late_at <= now_at ORDER BY s.late_at LIMIT most);
END $$;

REVOKE ALL ON FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) TO asyncgate_app;

-- It looks across tenants, so it belongs to the role that may; only for that moment may that role create anything here.
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
