-- Set the idle time of deliveries, so that they are claimed again after the rest of the ack wait.
-- KEYS: the stream. ARGV: group, consumer, idle time in ms, then the ids of the entries.
-- Entries that another consumer has claimed are not changed.
for index = 4, #ARGV do
    local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[index], ARGV[index], 1, ARGV[2])
    if #mine > 0 then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[index], 'IDLE', ARGV[3], 'JUSTID')
    end
end
