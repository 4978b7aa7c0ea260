-- Write a learner's configuration under its lease.
-- KEYS: 1 {EXP}:lease:ROLE   2 {EXP}:learner:NAME
-- ARGV: 1 fence   2 token   3 configuration
local held = redis.call('HMGET', KEYS[1], 'fence', 'token')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return 'lost'
end
redis.call('SET', KEYS[2], ARGV[3])
return 'done'
