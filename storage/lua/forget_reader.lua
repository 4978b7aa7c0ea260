-- Remove a reader: retention no longer waits for it.
-- KEYS: 1 {EXP:SHARD}:state
-- ARGV: 1 reader
local readers = {}
for name in string.gmatch(redis.call('HGET', KEYS[1], 'readers') or '', '%S+') do
  if name ~= ARGV[1] then
    readers[#readers + 1] = name
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  local prefix = 'reader:' .. ARGV[1] .. ':'
  for _, field in ipairs({ 'kind', 'capacity_steps', 'queue_steps', 'mark', 'allowed_steps',
    'fence', 'token', 'until', 'holder' }) do
    redis.call('HDEL', KEYS[1], prefix .. field)
  end
  redis.call('HSET', KEYS[1], 'readers', table.concat(readers, ' '))
end
return 'forgotten'
