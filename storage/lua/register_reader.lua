-- Make a reader known to retention, or update its settings; its mark is kept.
-- KEYS: 1 {EXP:SHARD}:state
-- ARGV: 1 reader   2 kind   3 capacity in steps   4 queue in steps   5 "1" begins at the first entry
local first = tonumber(redis.call('HGET', KEYS[1], 'dropped_entries') or '')
if not first then
  return { 'unknown experiment' }
end
local prefix = 'reader:' .. ARGV[1] .. ':'
local readers = redis.call('HGET', KEYS[1], 'readers') or ''
if not string.find(' ' .. readers .. ' ', ' ' .. ARGV[1] .. ' ', 1, true) then
  local mark = first
  if ARGV[2] == 'queue' and ARGV[5] ~= '1' then
    mark = tonumber(redis.call('HGET', KEYS[1], 'entry'))
  end
  redis.call('HSET', KEYS[1], 'readers', readers == '' and ARGV[1] or readers .. ' ' .. ARGV[1],
    prefix .. 'mark', string.format('%d', mark))
end
redis.call('HSET', KEYS[1], prefix .. 'kind', ARGV[2], prefix .. 'capacity_steps', ARGV[3],
  prefix .. 'queue_steps', ARGV[4])
if ARGV[2] == 'window' then
  return { 'registered', string.format('%d', first) }
end
return { 'registered', redis.call('HGET', KEYS[1], prefix .. 'mark') }
