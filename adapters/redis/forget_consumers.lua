-- Remove idle consumers without pending entries: every process that reads creates a consumer.
-- KEYS: the stream. ARGV: group, idle time in ms. Atomic, because deleting a consumer deletes its pending entries.
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local fields = {}
    for index = 1, #consumer, 2 do
        fields[consumer[index]] = consumer[index + 1]
    end
    if fields['pending'] == 0 and fields['idle'] >= tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], fields['name'])
    end
end
