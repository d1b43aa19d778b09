-- Let deliveries come again once they have been idle for as long as is still missing.
-- KEYS: the stream. ARGV: group, consumer, ms that they count as having been idle, then the ids of the entries.
-- What another consumer has got by now stays with it: a late answer changes nothing there.
for index = 4, #ARGV do
    local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[index], ARGV[index], 1, ARGV[2])
    if #mine > 0 then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[index], 'IDLE', ARGV[3], 'JUSTID')
    end
end
