-- An agent's index: allotted from 0 at its first call, and kept.
-- KEYS: 1 {EXP}:agents
-- ARGV: 1 agent
local index = redis.call('HGET', KEYS[1], ARGV[1])
if not index then
  index = redis.call('HLEN', KEYS[1])
  redis.call('HSET', KEYS[1], ARGV[1], index)
end
return tostring(index)
