-- Delete a frame if its bytes are still those seen, header apart.
-- KEYS: 1 {EXP:SHARD}:state   2 {EXP:SHARD}:frame:KEY
-- ARGV: 1 the bytes seen, header included   2 header digits   3 bytes of Redis beyond a payload
local digits = tonumber(ARGV[2])
local payload = redis.call('GET', KEYS[2])
if not payload or string.sub(payload, digits + 1) ~= string.sub(ARGV[1], digits + 1) then
  return 0
end
redis.call('DEL', KEYS[2])
redis.call('HINCRBY', KEYS[1], 'bytes', string.format('%d', -#payload - tonumber(ARGV[3])))
redis.call('HINCRBY', KEYS[1], 'dropped_frames', 1)
return 1
