-- How a peer's session is set: what somebody who looked it up would set.
SELECT
    set_config('work_mem', '512MB', false),
    set_config('maintenance_work_mem', '256MB', false),
    set_config('synchronous_commit', 'off', false),
    set_config('jit', 'off', false),
    -- Rare dead letters are expected to be rarer still, and whole messages would be sorted to merge them in.
    set_config('enable_mergejoin', 'off', false);
