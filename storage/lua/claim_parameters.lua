-- Raise the fence of a parameters hash, so that an older holder can no longer publish.
-- KEYS: 1 {EXP}:parameters:LEARNER
-- ARGV: 1 fence   2 token
local unpack = unpack or table.unpack
local held = redis.call('HMGET', KEYS[1], 'holder_fence', 'holder_token')
local fence = tonumber(held[1] or 0) or 0
if fence > tonumber(ARGV[1]) or (fence == tonumber(ARGV[1]) and held[2] ~= ARGV[2]) then
  return { 'lost' }
end
local head = redis.call('HGETALL', KEYS[1])
redis.call('HSET', KEYS[1], 'holder_fence', ARGV[1], 'holder_token', ARGV[2])
return { 'done', unpack(head) }
