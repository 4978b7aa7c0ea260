-- Begin a new incarnation of a writer: the server's time in milliseconds, and more than the last.
-- KEYS: 1 {EXP:SHARD}:state   2 {EXP:SHARD}:writer:AGENT
-- ARGV: 1 creation id
if redis.call('HGET', KEYS[1], 'creation_id') ~= ARGV[1] then
  return { 'unknown experiment' }
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = tonumber(redis.call('HGET', KEYS[2], 'incarnation') or 0) or 0
local incarnation = string.format('%d', math.max(now, last + 1))
redis.call('HSET', KEYS[2], 'incarnation', incarnation, 'sequence', '0', 'entry', '0')
return { 'registered', incarnation }
