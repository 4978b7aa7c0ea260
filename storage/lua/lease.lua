-- Take, renew or release a role that must be single. A fence only grows.
-- KEYS: 1 {EXP}:lease:ROLE, or {EXP:SHARD}:state for a reader of a shard
-- ARGV: 1 acquire, renew or release   2 prefix of the fields   3 token   4 holder
--       5 duration in milliseconds   6 least fence (acquire), fence (renew, release)
local prefix = ARGV[2]
if prefix ~= '' and redis.call('HEXISTS', KEYS[1], prefix .. 'kind') == 0 then
  return { 'unknown experiment' }
end
local held = redis.call('HMGET', KEYS[1], prefix .. 'token', prefix .. 'fence', prefix .. 'until')
local token, fence = held[1] or '', tonumber(held[2] or 0) or 0
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local mine = token == ARGV[3]
if ARGV[1] == 'acquire' then
  if not mine then
    if token ~= '' and (tonumber(held[3] or 0) or 0) > now then
      return { 'held' }
    end
    fence = math.max(now, fence + 1, tonumber(ARGV[6]))
  end
elseif not mine or fence ~= tonumber(ARGV[6]) then
  return { 'lost' }
end
local limit = now + tonumber(ARGV[5])
if ARGV[1] == 'release' then
  token, limit = '', now
else
  token = ARGV[3]
end
redis.call('HSET', KEYS[1], prefix .. 'token', token, prefix .. 'fence', string.format('%d', fence),
  prefix .. 'until', string.format('%d', limit))
if ARGV[1] == 'acquire' then
  redis.call('HSET', KEYS[1], prefix .. 'holder', ARGV[4])
end
return { 'done', string.format('%d', fence) }
