-- A queue reader has used everything up to an entry, or a reader sets what may be written.
-- KEYS: 1 {EXP:SHARD}:state   2 {EXP:SHARD}:segments
-- ARGV: 1 reader   2 fence   3 token   4 entry, '' to set the allowed steps   5 nonce
--       6 allowed steps, '' lifts the bound
local prefix = 'reader:' .. ARGV[1] .. ':'
local held = redis.call('HMGET', KEYS[1], prefix .. 'fence', prefix .. 'token', prefix .. 'mark')
if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] then
  return { 'lost' }
end
if ARGV[4] == '' then
  if ARGV[6] == '' then
    redis.call('HDEL', KEYS[1], prefix .. 'allowed_steps')
  else
    redis.call('HSET', KEYS[1], prefix .. 'allowed_steps', ARGV[6])
  end
  return { 'done' }
end
local live = redis.call('XRANGE', KEYS[2], ARGV[4] .. '-0', ARGV[4] .. '-0')[1]
if not live then
  return { 'refused' }
end
for at = 1, #live[2], 2 do
  if live[2][at] == 'nonce' and live[2][at + 1] ~= ARGV[5] then
    return { 'refused' }
  end
end
if tonumber(ARGV[4]) > (tonumber(held[3] or 0) or 0) then
  redis.call('HSET', KEYS[1], prefix .. 'mark', ARGV[4])
end
return { 'done' }
