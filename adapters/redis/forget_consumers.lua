-- Forget consumers that hold nothing and have done nothing for a while: every process that reads leaves a name.
-- KEYS: the stream. ARGV: group, ms of idleness. In one step, because with a consumer goes what it holds.
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local fields = {}
    for index = 1, #consumer, 2 do
        fields[consumer[index]] = consumer[index + 1]
    end
    if fields['pending'] == 0 and fields['idle'] >= tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], fields['name'])
    end
end
