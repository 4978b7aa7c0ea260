-- Make a parameter set, written before under an expiry, the newest; then tell who listens.
-- KEYS: 1 {EXP}:parameters:LEARNER (also the channel)   2 {EXP}:parameters:LEARNER:FENCE.VERSION
-- ARGV: 1 fence   2 token   3 version   4 iteration   5 entry   6 size in bytes   7 content hash
--       8 message   9 sets to keep
local head = {}
local flat = redis.call('HGETALL', KEYS[1])
for at = 1, #flat, 2 do
  head[flat[at]] = flat[at + 1]
end
if head['holder_fence'] ~= ARGV[1] or head['holder_token'] ~= ARGV[2] then
  return 'lost'
end
local name = ARGV[1] .. '.' .. ARGV[3]
if head['fence'] == ARGV[1] and tonumber(head['version']) >= tonumber(ARGV[3]) then
  if head['version'] == ARGV[3] and head['content_hash'] == ARGV[7] then
    redis.call('PERSIST', KEYS[2])
    redis.call('PUBLISH', KEYS[1], name)
    return 'done'
  end
  return 'older'
end
if redis.call('PERSIST', KEYS[2]) == 0 then
  return 'absent'
end
local values = { name }
for value in string.gmatch(head['values'] or '', '%S+') do
  if #values < tonumber(ARGV[9]) then
    values[#values + 1] = value
  else
    redis.call('DEL', KEYS[1] .. ':' .. value)
  end
end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'version', ARGV[3], 'iteration', ARGV[4],
  'entry', ARGV[5], 'bytes', ARGV[6], 'content_hash', ARGV[7], 'message', ARGV[8],
  'values', table.concat(values, ' '), 'time', redis.call('TIME')[1])
redis.call('PUBLISH', KEYS[1], name)
return 'done'
